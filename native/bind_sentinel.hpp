#pragma once

#include <nanobind/nanobind.h>

namespace elasticstate {

/// Sentinel and GlooSockets for Python. To be called after ControlPage is bound.
void bind_sentinel(nanobind::module_ &m);

}  // namespace elasticstate
