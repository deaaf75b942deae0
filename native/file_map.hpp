#pragma once

#include <cstddef>
#include <cstdint>

namespace elasticstate {

/// A whole file in memory, mapped shared with all its pages. When the file has become longer, only the new part is
/// mapped: it follows in address space that was reserved, so the old part need not be mapped again, and stays in place.
class FileMap {
public:
    /// Throws std::system_error.
    explicit FileMap(int fd);
    ~FileMap();
    FileMap(const FileMap &) = delete;
    FileMap &operator=(const FileMap &) = delete;

    /// Maps what the file has more than before. Returns false, and changes nothing, if the reserved address space
    /// does not suffice.
    /// Throws std::system_error.
    bool grow(int fd);

    std::uint8_t *data() const noexcept { return data_; }
    std::size_t size() const noexcept { return size_; }

private:
    std::uint8_t *data_ = nullptr;
    std::size_t size_ = 0;
    std::size_t reserved_ = 0;  // bytes of address space, a multiple of the page size
};

/// Maps all pages of this memory now, by several threads, so that no later access faults. The content does not change.
void populate(std::uint8_t *memory, std::size_t size);

}  // namespace elasticstate
