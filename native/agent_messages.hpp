#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>

/// The messages that a sentinel sends without Python, encoded as in net/messages.py: a MessagePack array of the
/// tag and the fields in order. A test decodes each of them.
namespace elasticstate::agent_messages {

inline std::string begin(std::string_view tag, std::size_t fields) {
    std::string message;
    message += static_cast<char>(0x90 | (1 + fields));  // fixarray
    message += static_cast<char>(0xa0 | tag.size());    // fixstr, up to 31 bytes
    message += tag;
    return message;
}

inline void add(std::string &message, std::uint64_t value) {
    message += static_cast<char>(0xcf);  // uint 64, big-endian
    for (int shift = 56; shift >= 0; shift -= 8) {
        message += static_cast<char>(value >> shift);
    }
}

inline void add(std::string &message, bool value) { message += static_cast<char>(value ? 0xc3 : 0xc2); }

inline void add(std::string &message, double value) {
    message += static_cast<char>(0xcb);  // float 64, big-endian
    const auto bits = std::bit_cast<std::uint64_t>(value);
    for (int shift = 56; shift >= 0; shift -= 8) {
        message += static_cast<char>(bits >> shift);
    }
}

inline std::string hold_answer(std::uint64_t generation, std::uint64_t ticks, bool in_gate, std::uint64_t number) {
    std::string message = begin("HoldAnswer", 4);
    add(message, generation);
    add(message, ticks);
    add(message, in_gate);
    add(message, number);
    return message;
}

inline std::string first(std::uint64_t generation, double train_s, double sync_s) {
    std::string message = begin("First", 3);
    add(message, generation);
    add(message, train_s);
    add(message, sync_s);
    return message;
}

/// `signal` is one of the first 31.
inline std::string notice(int signal) { return begin("WorkerPreemptionNotice", 1) + static_cast<char>(signal); }

/// Returns the END by which an agent would end a generation now, without the head. `cause` has at most 31 bytes.
inline std::string end(std::uint64_t generation, std::string_view cause) {
    std::string message = begin("End", 3);
    add(message, generation);
    message += static_cast<char>(0xc0);  // at_tick: nil
    message += static_cast<char>(0xa0 | cause.size());
    message += cause;
    return message;
}

}  // namespace elasticstate::agent_messages
