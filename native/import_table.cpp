#include "import_table.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

namespace elasticstate {

std::optional<ImportTable> ImportTable::of(std::string_view library) noexcept {
    ImportTable table;
    table.library_ = library;
    if (dl_iterate_phdr(read_library, &table) == 0 || table.calls_ == nullptr || table.symbols_ == nullptr ||
        table.names_ == nullptr) {
        return std::nullopt;
    }
    return table;
}

int ImportTable::read_library(dl_phdr_info *info, std::size_t, void *result) noexcept {
    auto &table = *static_cast<ImportTable *>(result);
    const std::string_view path = info->dlpi_name;
    if (path.substr(path.rfind('/') + 1) != table.library_) {
        return 0;
    }
    table.base_ = info->dlpi_addr;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const ElfW(Phdr) &header = info->dlpi_phdr[i];
        const ElfW(Addr) begin = info->dlpi_addr + header.p_vaddr, end = begin + header.p_memsz;
        if (header.p_type == PT_LOAD) {
            table.begin_ = std::min(table.begin_, begin);
            table.end_ = std::max(table.end_, end);
        } else if (header.p_type == PT_GNU_RELRO) {
            table.read_only_begin_ = begin;
            table.read_only_end_ = end;
        } else if (header.p_type == PT_DYNAMIC) {
            table.read_dynamic(reinterpret_cast<const ElfW(Dyn) *>(begin));
        }
    }
    return 1;
}

void ImportTable::read_dynamic(const ElfW(Dyn) *entry) noexcept {
    for (; entry->d_tag != DT_NULL; ++entry) {
        switch (entry->d_tag) {
            case DT_SYMTAB: symbols_ = reinterpret_cast<const ElfW(Sym) *>(entry->d_un.d_ptr); break;
            case DT_STRTAB: names_ = reinterpret_cast<const char *>(entry->d_un.d_ptr); break;
            case DT_JMPREL: calls_ = reinterpret_cast<const ElfW(Rela) *>(entry->d_un.d_ptr); break;
            case DT_PLTRELSZ: count_ = entry->d_un.d_val / sizeof(ElfW(Rela)); break;
            default: break;
        }
    }
}

void **ImportTable::find(std::string_view name) const noexcept {
    for (std::size_t i = 0; i < count_; ++i) {
        const ElfW(Rela) &call = calls_[i];
        if (names_ + symbols_[ELF64_R_SYM(call.r_info)].st_name != name) {
            continue;
        }
        auto *const entry = reinterpret_cast<void **>(base_ + call.r_offset);
        const auto present = reinterpret_cast<ElfW(Addr)>(__atomic_load_n(entry, __ATOMIC_SEQ_CST));
        const bool is_resolved = present != 0 && (present < begin_ || end_ <= present);
        return is_resolved ? entry : nullptr;
    }
    return nullptr;
}

bool ImportTable::write(void **entry, void *function) const noexcept {
    const auto at = reinterpret_cast<ElfW(Addr)>(entry);
    const bool read_only = read_only_begin_ <= at && at < read_only_end_;
    const auto size = static_cast<ElfW(Addr)>(sysconf(_SC_PAGESIZE));
    void *const page = reinterpret_cast<void *>(at & ~(size - 1));
    if (read_only && mprotect(page, size, PROT_READ | PROT_WRITE) != 0) {
        return false;
    }
    __atomic_store_n(entry, function, __ATOMIC_SEQ_CST);
    if (read_only) {
        mprotect(page, size, PROT_READ);
    }
    return true;
}

}  // namespace elasticstate
