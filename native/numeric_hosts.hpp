#pragma once

namespace elasticstate {

/// Lets libtorch_cpu.so describe the ends of its connections by addresses. By default torch asks the resolver for the
/// name of an address (getnameinfo in socket.cpp, torch 2.13), only to show it: a worker whose name server does not
/// answer waits for it, usually for 10 s, when it makes its first store. False: this build of torch does not permit it.
///
/// The entry for the function in the library's table of imported functions is replaced.
bool show_numeric_hosts() noexcept;

}  // namespace elasticstate
