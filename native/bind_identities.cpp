// What a tick record reads of Python objects: a loop in Python takes several times as long.
#include "bind_identities.hpp"

#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

namespace elasticstate {

namespace {

template <typename T>
T load(std::uintptr_t address) {
    return __atomic_load_n(reinterpret_cast<const T *>(address), __ATOMIC_RELAXED);
}

void prefetch(std::uintptr_t address) { __builtin_prefetch(reinterpret_cast<const void *>(address)); }

// Places in CPython's objects, which the limited API hides. They only say what to prefetch: wrong ones would cost time.
constexpr std::size_t kListItems = 24;  // PyListObject::ob_item
constexpr std::size_t kDictKeys = 32;   // PyDictObject::ma_keys

/// Returns the function that reads the attribute that a descriptor stands for; nullptr for any other object.
descrgetfunc getter_of(nb::handle descriptor) {
    return reinterpret_cast<descrgetfunc>(PyType_GetSlot(Py_TYPE(descriptor.ptr()), Py_tp_descr_get));
}

/// The keys and values of dicts and lists at one time, compared by identity. Items are kept alive, so no new object gets
/// the address of an old one.
class Identities {
public:
    explicit Identities(const nb::list &containers) {
        for (nb::handle container : containers) {
            add(container.ptr());
        }
    }
    Identities(const Identities &) = delete;
    Identities &operator=(const Identities &) = delete;
    ~Identities() { clear(); }

    /// Returns true if each container has the same keys and values as at first, in the same order.
    bool unchanged() {
        std::size_t at = 0;
        for (std::size_t i = 0; i < containers_.size(); ++i) {
            Container &container = containers_[i];
            prefetch_ahead(i);
            const std::uint64_t modification = modification_of(container.object);
            if (modification != 0 && modification == container.modification) {
                at = container.end;
                continue;
            }
            if (PyDict_Check(container.object)) {
                if (static_cast<std::size_t>(NB_DICT_GET_SIZE(container.object)) * 2 != container.end - at) {
                    return false;
                }
                Py_ssize_t position = 0;
                PyObject *key = nullptr;
                PyObject *value = nullptr;
                while (PyDict_Next(container.object, &position, &key, &value)) {
                    if (items_[at] != key || items_[at + 1] != value) {
                        return false;
                    }
                    at += 2;
                }
                container.modification = modification;
                continue;
            }
            if (static_cast<std::size_t>(NB_LIST_GET_SIZE(container.object)) != container.end - at) {
                return false;
            }
            for (Py_ssize_t i = 0; at < container.end; ++i, ++at) {
                if (items_[at] != NB_LIST_GET_ITEM(container.object, i)) {
                    return false;
                }
            }
        }
        return true;
    }

    int traverse(visitproc visit, void *arg) const {
        for (const Container &container : containers_) {
            Py_VISIT(container.object);
        }
        for (PyObject *item : items_) {
            Py_VISIT(item);
        }
        return 0;
    }

    void clear() {
        std::vector<Container> containers;
        std::vector<PyObject *> items;
        containers.swap(containers_);
        items.swap(items_);
        for (const Container &container : containers) {
            Py_DECREF(container.object);
        }
        for (PyObject *item : items) {
            Py_DECREF(item);
        }
    }

private:
    struct Container {
        PyObject *object;
        std::size_t end;             // of its items in items_
        std::uint64_t modification;  // at the last look at all items
    };

    /// Returns a number that a dict never has again after a change of its items (PEP 509); 0 where there is none. With it,
    /// a look at a dict reads one cache line instead of three or four.
    static std::uint64_t modification_of(PyObject *container) {
#if PY_VERSION_HEX < 0x030C0000
        return PyDict_Check(container) ? reinterpret_cast<PyDictObject *>(container)->ma_version_tag : 0;
#else
        (void)container;  // Python 3.12 deprecates the number
        return 0;
#endif
    }

    /// Requests the memory of the next containers, so that the loop does not wait for one after the other.
    void prefetch_ahead(std::size_t i) const {
        if (i + 16 < containers_.size()) {
            prefetch(reinterpret_cast<std::uintptr_t>(containers_[i + 16].object));
        }
        if (i + 8 < containers_.size()) {
            PyObject *container = containers_[i + 8].object;
            const auto address = reinterpret_cast<std::uintptr_t>(container);
            if (!PyDict_Check(container)) {
                prefetch(load<std::uintptr_t>(address + kListItems));
            } else if (modification_of(container) == 0) {
                prefetch(load<std::uintptr_t>(address + kDictKeys) + 64);
            }
        }
    }

    void keep(PyObject *item) {
        items_.push_back(item);
        Py_INCREF(item);
    }

    void add(PyObject *container) {
        if (PyDict_Check(container)) {
            Py_ssize_t position = 0;
            PyObject *key = nullptr;
            PyObject *value = nullptr;
            while (PyDict_Next(container, &position, &key, &value)) {
                keep(key);
                keep(value);
            }
        } else if (PyList_Check(container)) {
            for (Py_ssize_t i = 0; i < NB_LIST_GET_SIZE(container); ++i) {
                keep(NB_LIST_GET_ITEM(container, i));
            }
        } else {
            throw nb::type_error("a container must be a dict or a list");
        }
        Py_INCREF(container);
        containers_.push_back({container, items_.size(), modification_of(container)});
    }

    std::vector<Container> containers_;
    std::vector<PyObject *> items_;  // a dict's keys and values alternate
};

int traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    return nb::inst_ready(self) ? nb::inst_ptr<Identities>(self)->traverse(visit, arg) : 0;
}

int clear(PyObject *self) {
    nb::inst_ptr<Identities>(self)->clear();
    return 0;
}

PyType_Slot slots[] = {
    {Py_tp_traverse, reinterpret_cast<void *>(traverse)},
    {Py_tp_clear, reinterpret_cast<void *>(clear)},
    {0, nullptr},
};

/// Returns the values of an integer attribute of all objects, as int64[n]. ``attribute``: a descriptor of their type.
///
/// Most of the time would be waits for memory, so objects are requested ahead, and what their word at `in_object` points
/// to, if it is not 0.
nb::bytes integers_of(const nb::list &objects, nb::handle attribute, std::size_t in_object) {
    constexpr std::size_t kAhead = 8;
    const descrgetfunc get = getter_of(attribute);
    if (get == nullptr) {
        throw nb::type_error("the attribute must be a descriptor");
    }
    std::vector<std::int64_t> found;
    found.reserve(objects.size());
    const auto address = [&](std::size_t i) { return reinterpret_cast<std::uintptr_t>(NB_LIST_GET_ITEM(objects.ptr(), i)); };
    for (std::size_t i = 0; i < objects.size(); ++i) {
        if (i + 2 * kAhead < objects.size()) {
            prefetch(address(i + 2 * kAhead) + in_object);
        }
        if (in_object != 0 && i + kAhead < objects.size()) {
            prefetch(load<std::uintptr_t>(address(i + kAhead) + in_object));
        }
        nb::handle object = NB_LIST_GET_ITEM(objects.ptr(), i);
        PyObject *value = get(attribute.ptr(), object.ptr(), reinterpret_cast<PyObject *>(Py_TYPE(object.ptr())));
        if (value == nullptr) {
            throw nb::python_error();
        }
        found.push_back(PyLong_AsLongLong(value));
        Py_DECREF(value);
        if (found.back() == -1 && PyErr_Occurred() != nullptr) {
            throw nb::python_error();
        }
    }
    return nb::bytes(reinterpret_cast<const char *>(found.data()), found.size() * sizeof(std::int64_t));
}

/// Returns a counter of each object, as int64[n]; -1 for an object without one. The object has a pointer to its content
/// at `in_object`, the content has one to the counter's object at `in_content`, which has the uint32 at `in_counter`.
///
/// Each pointer is requested from memory some objects ahead: one after the other, most of the time would be waits.
nb::bytes counters_of(const nb::list &objects, std::size_t in_object, std::size_t in_content, std::size_t in_counter) {
    constexpr std::size_t kAhead = 8;
    const std::size_t count = objects.size();
    std::vector<std::uintptr_t> at(count);
    std::vector<std::int64_t> found(count);
    const PyTypeObject *large_enough = nullptr;  // the type of the objects seen last
    for (std::size_t i = 0; i < count + 3 * kAhead; ++i) {
        if (i < count) {
            PyObject *object = NB_LIST_GET_ITEM(objects.ptr(), static_cast<Py_ssize_t>(i));
            if (Py_TYPE(object) != large_enough) {
                const nb::object size = nb::handle(reinterpret_cast<PyObject *>(Py_TYPE(object))).attr("__basicsize__");
                if (nb::cast<std::size_t>(size) < in_object + sizeof(std::uintptr_t)) {
                    throw nb::type_error("an object is too small for a pointer there");
                }
                large_enough = Py_TYPE(object);
            }
            at[i] = reinterpret_cast<std::uintptr_t>(object) + in_object;
            prefetch(at[i]);
        }
        if (const std::size_t j = i - kAhead; j < count) {
            const auto content = load<std::uintptr_t>(at[j]);
            at[j] = content == 0 ? 0 : content + in_content;
            prefetch(at[j]);
        }
        if (const std::size_t j = i - 2 * kAhead; j < count) {
            const std::uintptr_t counter = at[j] == 0 ? 0 : load<std::uintptr_t>(at[j]);
            at[j] = counter == 0 ? 0 : counter + in_counter;
            prefetch(at[j]);
        }
        if (const std::size_t j = i - 3 * kAhead; j < count) {
            found[j] = at[j] == 0 ? -1 : std::int64_t{load<std::uint32_t>(at[j])};
        }
    }
    return nb::bytes(reinterpret_cast<const char *>(found.data()), found.size() * sizeof(std::int64_t));
}

/// Mixes the bits of x: the finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators).
std::uint64_t mixed(std::uint64_t x) {
    x += 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

/// Returns an integer attribute of an object. `get`: the attribute's method, or its descriptor.
std::uint64_t integer_of(nb::handle object, nb::handle get) {
    const descrgetfunc read = PyCallable_Check(get.ptr()) ? nullptr : getter_of(get);
    PyObject *arguments[] = {object.ptr()};
    const nb::object value =
        nb::steal(read != nullptr ? read(get.ptr(), object.ptr(), reinterpret_cast<PyObject *>(Py_TYPE(object.ptr())))
                                  : PyObject_Vectorcall(get.ptr(), arguments, 1, nullptr));
    const std::uint64_t found = value.is_valid() ? PyLong_AsUnsignedLongLong(value.ptr()) : 0;
    if (PyErr_Occurred() != nullptr) {
        throw nb::python_error();
    }
    return found;
}

/// Returns a checksum of `words` times eight bytes of each object's memory. `seed` decides which bytes.
///
/// `address` and `bytes`: methods or descriptors for the begin of an object's memory and for its size.
std::uint64_t sample(const nb::list &objects, nb::handle address, nb::handle bytes, std::uint64_t seed,
                     std::size_t words) {
    struct Place {
        std::uintptr_t at;
        std::size_t length;
    };
    std::vector<Place> places;
    places.reserve(objects.size() * words);
    for (nb::handle object : objects) {
        const std::uintptr_t begin = integer_of(object, address);
        const std::size_t size = integer_of(object, bytes);
        const std::size_t length = std::min(size, sizeof(std::uint64_t));
        for (std::size_t word = 0; word < words; ++word) {
            seed = mixed(seed);
            const std::size_t count = size - length + 1;  // of the places; below 4 GiB without a slow division
            const std::size_t offset = count >> 32 == 0 ? ((seed >> 32) * count) >> 32 : seed % count;
            places.push_back({begin + offset, length});
            prefetch(begin + offset);
        }
    }
    std::uint64_t found = 0;
    for (const Place &place : places) {
        std::uint64_t value = 0;
        std::memcpy(&value, reinterpret_cast<const void *>(place.at), place.length);
        found = mixed(found ^ value);
    }
    return found;
}

}  // namespace

void bind_identities(nb::module_ &m) {
    nb::class_<Identities>(m, "Identities", nb::type_slots(slots))
        .def(nb::init<const nb::list &>(), "containers"_a)
        .def("unchanged", &Identities::unchanged);
    m.def("integers_of", &integers_of, "objects"_a, "attribute"_a, "in_object"_a = 0);
    m.def("counters_of", &counters_of, "objects"_a, "in_object"_a, "in_content"_a, "in_counter"_a);
    m.def("sample", &sample, "objects"_a, "address"_a, "bytes"_a, "seed"_a, "words"_a);
}

}  // namespace elasticstate
