// check: assertions that stay on in release builds.
// A failed CHECK throws CheckFailed. Every thread entry and every API call turns that into
// Status::invariant, which poisons the engine: nothing is published after doubting ourselves, but
// the process of the trainer is neither aborted nor printed to.
#pragma once

#include <stdexcept>
#include <string>

namespace statehold {

class CheckFailed : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

[[noreturn]] inline void check_failed(const char* condition, const char* file, int line) {
  throw CheckFailed(std::string(condition) + " at " + file + ":" + std::to_string(line));
}

}  // namespace statehold

#define CHECK(condition)                                              \
  do {                                                                \
    if (!(condition)) [[unlikely]]                                    \
      ::statehold::check_failed(#condition, __FILE_NAME__, __LINE__); \
  } while (false)
