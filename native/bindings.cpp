// The bindings of the native code for Python. elasticstate/_native.pyi has the types and docstrings.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "bind_identities.hpp"
#include "bind_sentinel.hpp"
#include "control_page.hpp"
#include "crc32c.hpp"
#include "file_map.hpp"
#include "permutation.hpp"
#include "pieces.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using elasticstate::ControlPage;
using elasticstate::HoldWord;
using elasticstate::Seal;

namespace {

using Writable = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Readable = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WritableWords = nb::ndarray<std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

using Numbers = std::vector<std::uint64_t>;

constexpr std::uint64_t MOST_INDICES = std::uint64_t{1} << 62;

void check_range(std::size_t begin, std::size_t end, std::size_t size) {
    if (begin > end || end > size) {
        const std::string message = "bytes " + std::to_string(begin) + " to " + std::to_string(end) +
                                    " are outside a buffer of " + std::to_string(size);
        throw nb::value_error(message.c_str());
    }
}

std::uint32_t gather_pieces(Writable buffer, const elasticstate::Pieces &pieces, std::size_t begin, std::size_t end,
                            std::uint32_t checksum) {
    check_range(begin, end, buffer.size());
    const nb::gil_scoped_release nogil;
    return elasticstate::gather(buffer.data(), pieces, begin, end, checksum);
}

std::uint32_t gather_each_piece(Writable buffer, const elasticstate::Pieces &pieces, std::size_t begin, std::size_t end,
                                WritableWords each, std::uint32_t checksum) {
    check_range(begin, end, buffer.size());
    check_range(pieces.count(), pieces.count(), each.size());
    const nb::gil_scoped_release nogil;
    return elasticstate::gather_each(buffer.data(), pieces, begin, end, checksum, each.data());
}

void fill_pieces(Writable buffer, const elasticstate::Pieces &pieces, std::size_t begin, std::size_t end) {
    check_range(begin, end, buffer.size());
    const nb::gil_scoped_release nogil;
    elasticstate::fill(buffer.data(), pieces, begin, end);
}

std::uint32_t scatter_pieces(Readable buffer, const elasticstate::Pieces &pieces, std::size_t begin, std::size_t end,
                             std::uint32_t checksum) {
    check_range(begin, end, buffer.size());
    const nb::gil_scoped_release nogil;
    return elasticstate::scatter(buffer.data(), pieces, begin, end, checksum);
}

bool equal_pieces(Readable buffer, const elasticstate::Pieces &pieces) {
    const auto all = pieces.all();
    check_range(0, all.empty() ? 0 : all.back().offset + all.back().size, buffer.size());
    const nb::gil_scoped_release nogil;
    return elasticstate::equal(buffer.data(), pieces);
}

std::uint32_t checksum_of(Readable buffer, std::size_t begin, std::size_t end, std::uint32_t checksum) {
    check_range(begin, end, buffer.size());
    const nb::gil_scoped_release nogil;
    return elasticstate::checksum_of(buffer.data(), begin, end, checksum);
}

std::uint32_t copy_bytes(Writable target, Readable source, std::uint32_t checksum) {
    if (target.size() != source.size()) {
        const std::string message = "a target of " + std::to_string(target.size()) + " bytes, but " +
                                    std::to_string(source.size()) + " bytes to copy";
        throw nb::value_error(message.c_str());
    }
    const nb::gil_scoped_release nogil;
    const std::uint32_t found =
        elasticstate::crc32c_copy(checksum, target.data(), source.data(), source.size(), true);
    elasticstate::finish_copies();
    return found;
}

void check_ranges(const Numbers &offsets, const Numbers &sizes, std::size_t buffer_size) {
    if (offsets.size() != sizes.size()) {
        const std::string message =
            std::to_string(offsets.size()) + " offsets, but " + std::to_string(sizes.size()) + " sizes";
        throw nb::value_error(message.c_str());
    }
    for (std::size_t i = 0; i < offsets.size(); ++i) {
        if (offsets[i] > buffer_size || sizes[i] > buffer_size - offsets[i]) {
            const std::string message = "range " + std::to_string(i) + ": " + std::to_string(sizes[i]) +
                                        " bytes at offset " + std::to_string(offsets[i]) +
                                        " are outside a buffer of " + std::to_string(buffer_size);
            throw nb::value_error(message.c_str());
        }
    }
}

void copy_runs(Readable buffer, const Numbers &offsets, const Numbers &sizes, const Numbers &addresses) {
    check_ranges(offsets, sizes, buffer.size());
    if (addresses.size() != sizes.size()) {
        const std::string message =
            std::to_string(addresses.size()) + " addresses, but " + std::to_string(sizes.size()) + " sizes";
        throw nb::value_error(message.c_str());
    }
    std::vector<elasticstate::Pieces::Piece> runs;
    runs.reserve(offsets.size());
    for (std::size_t i = 0; i < offsets.size(); ++i) {
        runs.push_back({reinterpret_cast<std::uint8_t *>(addresses[i]), offsets[i], sizes[i]});
    }
    const nb::gil_scoped_release nogil;
    elasticstate::copy_runs(buffer.data(), runs);
}

std::vector<std::uint32_t> checksums_of(Readable buffer, const Numbers &offsets, const Numbers &sizes) {
    check_ranges(offsets, sizes, buffer.size());
    std::vector<elasticstate::Range> ranges;
    ranges.reserve(offsets.size());
    for (std::size_t i = 0; i < offsets.size(); ++i) {
        ranges.push_back({offsets[i], sizes[i]});
    }
    const nb::gil_scoped_release nogil;
    return elasticstate::checksums_of(buffer.data(), ranges);
}

void bind_pieces(nb::module_ &m) {
    nb::class_<elasticstate::Pieces>(m, "Pieces")
        .def(
            "__init__",
            [](elasticstate::Pieces *self, const Numbers &addresses, const Numbers &sizes, const Numbers &offsets) {
                new (self) elasticstate::Pieces(addresses, sizes, offsets);
            },
            "addresses"_a, "sizes"_a, "offsets"_a)
        .def("__len__", &elasticstate::Pieces::count);
    // Without noconvert(), nanobind copies a buffer of another type, and the code would write to the copy.
    m.def("gather", &gather_pieces, "buffer"_a.noconvert(), "pieces"_a, "begin"_a, "end"_a, "checksum"_a = 0);
    m.def("gather_each", &gather_each_piece, "buffer"_a.noconvert(), "pieces"_a, "begin"_a, "end"_a,
          "each"_a.noconvert(), "checksum"_a = 0);
    m.def("fill", &fill_pieces, "buffer"_a.noconvert(), "pieces"_a, "begin"_a, "end"_a);
    m.def("scatter", &scatter_pieces, "buffer"_a.noconvert(), "pieces"_a, "begin"_a, "end"_a, "checksum"_a = 0);
    m.def("equal", &equal_pieces, "buffer"_a.noconvert(), "pieces"_a);
    m.def("copy", &copy_bytes, "target"_a.noconvert(), "source"_a.noconvert(), "checksum"_a = 0);
    m.def("copy_runs", &copy_runs, "buffer"_a.noconvert(), "offsets"_a, "sizes"_a, "addresses"_a);
    m.def("checksum", &checksum_of, "buffer"_a.noconvert(), "begin"_a, "end"_a, "checksum"_a = 0);
    m.def("checksums", &checksums_of, "buffer"_a.noconvert(), "offsets"_a, "sizes"_a);
}

void bind_file_map(nb::module_ &m) {
    using elasticstate::FileMap;
    nb::class_<FileMap>(m, "FileMap")
        .def(
            "__init__",
            [](FileMap *self, int fd) {
                const nb::gil_scoped_release nogil;
                new (self) FileMap(fd);
            },
            "fd"_a)
        .def(
            "grow",
            [](FileMap &self, int fd) {
                const nb::gil_scoped_release nogil;
                return self.grow(fd);
            },
            "fd"_a)
        .def("memory", [](nb::handle_t<FileMap> self) {
            const auto &map = nb::cast<const FileMap &>(self);
            return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(map.data(), {map.size()}, self);
        });
}

using Indices = nb::ndarray<std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void permute(Indices out, std::uint64_t n, std::uint64_t seed, std::uint64_t epoch, std::uint64_t start,
             std::uint64_t step) {
    const std::size_t count = out.size();
    const bool is_below = count == 0 || (start < n && (step == 0 || count - 1 <= (n - 1 - start) / step));
    if (n > MOST_INDICES || !is_below) {
        const std::string message = std::to_string(count) + " positions from " + std::to_string(start) +
                                    " on, in steps of " + std::to_string(step) + ", of range(" + std::to_string(n) + ")";
        throw nb::value_error(message.c_str());
    }
    const nb::gil_scoped_release nogil;
    const elasticstate::Permutation permutation(n, seed, epoch);
    for (std::size_t i = 0; i < count; ++i) {
        out.data()[i] = static_cast<std::int64_t>(permutation(start + i * step));
    }
}

void bind_permutation(nb::module_ &m) {
    m.def("permute", &permute, "out"_a.noconvert(), "n"_a, "seed"_a, "epoch"_a, "start"_a, "step"_a);
}

std::size_t checked_index(std::size_t index) {
    if (index > 1) {
        throw nb::value_error("the index must be 0 or 1, because a slot has two buffers");
    }
    return index;
}

std::array<std::uint8_t, 16> sixteen(const nb::bytes &bytes) {
    std::array<std::uint8_t, 16> result{};
    if (bytes.size() != result.size()) {
        throw nb::value_error("an owner and a tag must have 16 bytes each");
    }
    std::memcpy(result.data(), bytes.c_str(), result.size());
    return result;
}

void seal(ControlPage &page, std::size_t index, const nb::bytes &owner, std::uint64_t generation, std::uint64_t tick,
          std::uint64_t layout, std::uint64_t length, std::uint32_t checksum, const nb::bytes &tag) {
    page.seal(checked_index(index),
              Seal{sixteen(owner), 0, generation, tick, layout, length, sixteen(tag), checksum, 0});
}

nb::object sealed(const ControlPage &page, std::size_t index, const nb::bytes &owner) {
    const std::optional<Seal> found = page.sealed(checked_index(index), sixteen(owner));
    if (!found) {
        return nb::none();
    }
    const nb::bytes tag(found->tag.data(), found->tag.size());
    return nb::make_tuple(found->generation, found->tick, found->layout, found->length, found->checksum, tag);
}

nb::tuple stamp(const ControlPage &page) {
    const elasticstate::Stamp found = page.stamp();
    return nb::make_tuple(found.heartbeat, found.progress, found.place, found.generation, found.ticks);
}

/// Returns the newest words and their number, or None if their number is `last`.
nb::object words(const elasticstate::Slate &slate, std::uint64_t last) {
    const auto found = slate.read(last);
    return found ? nb::make_tuple(last, (*found)[0], (*found)[1], (*found)[2]) : nb::object(nb::none());
}

/// Returns the new points, each as three numbers, and the number of the next one.
nb::tuple points(const ControlPage &page, std::uint64_t since) {
    nb::list found;
    for (const elasticstate::Point &point : page.points(since)) {
        found.append(nb::make_tuple(point.generation, point.tick, point.own_us));
    }
    return nb::make_tuple(found, since);
}

void bind_control_page(nb::module_ &m) {
    nb::register_exception_translator([](const std::exception_ptr &error, void *) {
        try {
            std::rethrow_exception(error);
        } catch (const std::system_error &found) {
            PyErr_SetObject(PyExc_OSError, nb::make_tuple(found.code().value(), found.what()).ptr());
        }
    });
    nb::class_<ControlPage>(m, "ControlPage")
        .def(nb::init<std::optional<int>>(), "fd"_a.none())
        .def("reset", &ControlPage::reset)
        .def_prop_ro("word", &ControlPage::word, nb::rv_policy::reference_internal)
        .def("enter", &ControlPage::enter, "generation"_a)
        .def("set_place", &ControlPage::set_place, "place"_a)
        .def("set_lease", &ControlPage::set_lease, "until_ns"_a)
        .def(
            "pin",
            [](ControlPage &page, std::size_t index, std::uint64_t until_ns) {
                page.pin(checked_index(index), until_ns);
            },
            "index"_a, "until_ns"_a)
        .def(
            "pinned_until",
            [](ControlPage &page, std::size_t index) { return page.pinned_until(checked_index(index)); }, "index"_a)
        .def("set_stale", &ControlPage::set_stale, "stale"_a)
        .def_prop_ro("is_stale", &ControlPage::is_stale)
        .def("add_commit_s", &ControlPage::add_commit_s, "seconds"_a)
        .def_prop_ro("commit_s", &ControlPage::commit_s)
        .def("begin_training", &ControlPage::begin_training, "now_ns"_a)
        .def_prop_ro("trains_since", &ControlPage::trains_since)
        .def("heartbeat", &ControlPage::beat)
        .def("progress", &ControlPage::progress)
        .def("stamp", &stamp)
        .def(
            "add_point",
            [](ControlPage &page, std::uint64_t generation, std::uint64_t tick, std::uint64_t own_us) {
                page.add_point({generation, tick, own_us});
            },
            "generation"_a, "tick"_a, "own_us"_a)
        .def("points", &points, "since"_a)
        .def(
            "ask",
            [](ControlPage &page, std::uint64_t first, std::uint64_t second, std::uint64_t third) {
                page.question().write({first, second, third});
            },
            "first"_a, "second"_a, "third"_a)
        .def(
            "question", [](ControlPage &page, std::uint64_t last) { return words(page.question(), last); }, "last"_a)
        .def(
            "judge",
            [](ControlPage &page, std::uint64_t generation, std::uint64_t equal, std::uint64_t compared) {
                page.verdict().write({generation, equal, compared});
            },
            "generation"_a, "equal"_a, "compared"_a)
        .def(
            "verdict", [](ControlPage &page, std::uint64_t last) { return words(page.verdict(), last); }, "last"_a)
        .def("set_alone", &ControlPage::set_alone, "alone"_a)
        .def_prop_ro("is_alone", &ControlPage::is_alone)
        .def("seal", &seal, "index"_a, "owner"_a, "generation"_a, "tick"_a, "layout"_a, "length"_a, "checksum"_a,
             "tag"_a = nb::bytes("\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 16))
        .def("unseal", [](ControlPage &page, std::size_t index) { page.unseal(checked_index(index)); }, "index"_a)
        .def("sealed", &sealed, "index"_a, "owner"_a);
}

int exit_status = 0;

void exit_now() {
    std::fflush(nullptr);
    _exit(exit_status);
}

/// Ends the process after `seconds`, if it has not ended by then: a thread may wait for another one for ever.
void exit_at_latest(int status, double seconds, const std::string &line) {
    std::thread([status, seconds, line] {
        std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
        [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
        _exit(status);
    }).detach();
}

/// Python calls exit_now last of all.
void exit_after_finalization(int status) {
    exit_status = status;
    if (Py_AtExit(exit_now) != 0) {
        throw std::runtime_error("the interpreter accepts no more functions to call at its end");
    }
}

}  // namespace

NB_MODULE(_native, m) {
    // A worker may end while its sentinel's objects live. That is no leak, so nothing is printed to the user's log.
    nb::set_leak_warnings(false);

    nb::class_<HoldWord> hold_word(m, "HoldWord");
    hold_word.def(nb::init<>())
        .def("add_tick", &HoldWord::add_tick)
        .def("hold", &HoldWord::hold)
        .def("clear", &HoldWord::clear)
        .def("reset", &HoldWord::reset)
        .def("load", &HoldWord::load);
    hold_word.attr("HOLD") = HoldWord::HOLD;
    m.def("exit_after_finalization", &exit_after_finalization, "status"_a);
    m.def("exit_at_latest", &exit_at_latest, "status"_a, "seconds"_a, "line"_a);
    bind_pieces(m);
    bind_file_map(m);
    bind_permutation(m);
    bind_control_page(m);
    elasticstate::bind_identities(m);
    elasticstate::bind_sentinel(m);
}
