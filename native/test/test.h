// test: the little that the C++ tests need. TEST(name) { EXPECT(...); } and TEST_MAIN at the end.
#pragma once

#include <cstdio>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "check.h"

namespace statehold::test {

using TestList = std::vector<std::pair<const char*, void (*)()>>;

inline TestList& tests() {
  static TestList list;
  return list;
}

inline int run_all() {
  int failed = 0;
  for (const auto& [name, body] : tests()) {
    try {
      body();
      std::printf("ok    %s\n", name);
    } catch (const std::exception& error) {
      std::printf("FAIL  %s: %s\n", name, error.what());
      ++failed;
    }
  }
  return failed == 0 && !tests().empty() ? 0 : 1;
}

}  // namespace statehold::test

#define EXPECT(condition) CHECK(condition)

#define EXPECT_THROWS(kind, statement) \
  do {                                 \
    bool thrown = false;               \
    try {                              \
      statement;                       \
    } catch (const kind&) {            \
      thrown = true;                   \
    }                                  \
    EXPECT(thrown);                    \
  } while (false)

#define TEST(name)                                                        \
  static void test_##name();                                              \
  static const bool added_##name =                                        \
      (statehold::test::tests().emplace_back(#name, &test_##name), true); \
  static void test_##name()

#define TEST_MAIN \
  int main() { return statehold::test::run_all(); }
