// torch shows addresses, and does not ask for their names.
#include <string>

#include "check.hpp"
#include "numeric_hosts.hpp"
#include "waiting.hpp"

int main() {
    const std::string address = "127.0.0.1";
    CHECK(host_of(address) != address);  // /etc/hosts has its name
    CHECK(elasticstate::show_numeric_hosts() && elasticstate::show_numeric_hosts());
    CHECK(host_of(address) == address);
}
