#include "numeric_hosts.hpp"

#include <netdb.h>
#include <sys/socket.h>

#include <atomic>
#include <optional>

#include "import_table.hpp"

namespace elasticstate {
namespace {

using NameOf = int (*)(const sockaddr *, socklen_t, char *, socklen_t, char *, socklen_t, int);

std::atomic<NameOf> name_of{nullptr};  // what the entry contained; constant from before the first call of the other one

int address_of(const sockaddr *address, socklen_t size, char *host, socklen_t host_size, char *service,
               socklen_t service_size, int flags) {
    if ((flags & NI_NAMEREQD) == 0) {  // else an address is no answer
        flags |= NI_NUMERICHOST;
    }
    return name_of.load()(address, size, host, host_size, service, service_size, flags);
}

}  // namespace

bool show_numeric_hosts() noexcept {
    static const bool installed = [] {
        const std::optional<ImportTable> table = ImportTable::of("libtorch_cpu.so");
        return table && table->replace<NameOf>("getnameinfo", name_of, &address_of);
    }();
    return installed;
}

}  // namespace elasticstate
