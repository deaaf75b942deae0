#pragma once

#include <nanobind/nanobind.h>

namespace elasticstate {

/// Binds Sentinel and GlooSockets for Python. Call it after ControlPage is bound.
void bind_sentinel(nanobind::module_ &m);

}  // namespace elasticstate
