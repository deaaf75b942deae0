// Files that are mapped whole and become longer: random lengths, and the content seen through the map and the file.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <random>
#include <system_error>

#include "check.hpp"
#include "file_map.hpp"

using namespace elasticstate;

namespace {

class File {
public:
    File() : fd(memfd_create("file-map", MFD_CLOEXEC)) { CHECK(fd >= 0); }
    ~File() { close(fd); }
    File(const File &) = delete;
    File &operator=(const File &) = delete;

    void resize(std::size_t size) const { CHECK(ftruncate(fd, static_cast<off_t>(size)) == 0); }

    std::uint8_t at(std::size_t offset) const {
        std::uint8_t found = 0;
        CHECK(pread(fd, &found, 1, static_cast<off_t>(offset)) == 1);
        return found;
    }

    const int fd;
};

void test_a_file_grows_in_its_place() {
    std::mt19937_64 random(1);
    for (int round = 0; round < 20; ++round) {
        const File file;
        std::size_t size = 1 + random() % 300'000;
        file.resize(size);
        FileMap map(file.fd);
        std::uint8_t *const data = map.data();
        for (int step = 0; step < 5; ++step) {
            CHECK(map.data() == data && map.size() == size);
            const std::size_t at = random() % size;
            data[at] = 9;
            data[size - 1] = 5;
            CHECK(file.at(size - 1) == 5 && (file.at(at) == 9 || at == size - 1));
            CHECK(map.grow(file.fd));  // the same length
            const std::size_t longer = size + random() % 100'000;
            file.resize(longer);
            if (!map.grow(file.fd)) {
                CHECK(map.size() == size && data[size - 1] == 5);
                break;
            }
            CHECK(data[size - 1] == 5);
            size = longer;
        }
    }
}

void test_a_large_part_is_populated_by_several_threads() {
    const File file;
    const std::size_t size = std::size_t{70} << 20;
    file.resize(size);
    FileMap map(file.fd);
    CHECK(map.size() == size);
    for (std::size_t at = 0; at < size; at += 4096) {
        CHECK(map.data()[at] == 0);
    }
}

void test_an_empty_file_and_no_file() {
    const File file;
    FileMap map(file.fd);
    CHECK(map.data() == nullptr && map.size() == 0 && map.grow(file.fd));
    file.resize(10);
    CHECK(!map.grow(file.fd));
    bool is_refused = false;
    try {
        FileMap none(-1);
    } catch (const std::system_error &) {
        is_refused = true;
    }
    CHECK(is_refused);
}

}  // namespace

int main() {
    test_a_file_grows_in_its_place();
    test_a_large_part_is_populated_by_several_threads();
    test_an_empty_file_and_no_file();
}
