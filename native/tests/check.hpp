#pragma once

#include <cstdio>
#include <cstdlib>

/// Ends the test program, with the place and the condition, when the condition does not hold. Not compiled away.
#define CHECK(condition)                                                                         \
    do {                                                                                         \
        if (!(condition)) {                                                                      \
            std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);       \
            std::abort();                                                                        \
        }                                                                                        \
    } while (false)
