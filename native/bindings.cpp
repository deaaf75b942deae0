// Everything that Python sees of the native code. Types and docstrings for Python stand in elasticstate/_native.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "gather.hpp"
#include "hold_word.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using elasticstate::HoldWord;

namespace {

using Destination = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Source = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr std::size_t MAX_THREADS = 4;

void gather(Destination destination, const std::vector<Source> &sources, const std::vector<std::int64_t> &offsets) {
    if (sources.size() != offsets.size()) {
        const std::string message =
            std::to_string(sources.size()) + " sources, but " + std::to_string(offsets.size()) + " offsets";
        throw nb::value_error(message.c_str());
    }
    std::vector<elasticstate::Piece> pieces;
    pieces.reserve(sources.size());
    for (std::size_t i = 0; i < sources.size(); ++i) {
        const std::size_t size = sources[i].size();
        // Written so that nothing can overflow: first the size, then the offset against the room that is left.
        if (offsets[i] < 0 || size > destination.size() ||
            static_cast<std::uint64_t>(offsets[i]) > destination.size() - size) {
            const std::string message = "sources[" + std::to_string(i) + "]: " + std::to_string(size) +
                                        " bytes at offset " + std::to_string(offsets[i]) +
                                        " do not fit into a destination of " + std::to_string(destination.size());
            throw nb::value_error(message.c_str());
        }
        pieces.push_back({sources[i].data(), size, static_cast<std::size_t>(offsets[i])});
    }
    std::uint8_t *const bytes = destination.data();
    const nb::gil_scoped_release nogil;
    elasticstate::gather(bytes, pieces, std::min<std::size_t>(MAX_THREADS, std::thread::hardware_concurrency()));
}

}  // namespace

NB_MODULE(_native, m) {
    // A worker may end with its sentinel's objects alive: no leak, and no lines for it in the user's log.
    nb::set_leak_warnings(false);

    // Without noconvert() a destination that does not fit is silently copied, and the copy is what gets written.
    m.def("gather", &gather, "destination"_a.noconvert(), "sources"_a.noconvert(), "offsets"_a);

    nb::class_<HoldWord> hold_word(m, "HoldWord");
    hold_word.def(nb::init<>())
        .def("add_tick", &HoldWord::add_tick)
        .def("hold", &HoldWord::hold)
        .def("clear", &HoldWord::clear)
        .def("reset", &HoldWord::reset)
        .def("load", &HoldWord::load);
    hold_word.attr("HOLD") = HoldWord::HOLD;
}
