#pragma once

#include <nanobind/nanobind.h>

namespace elasticstate {

/// Binds Identities, integers_of and sample for Python.
void bind_identities(nanobind::module_ &m);

}  // namespace elasticstate
