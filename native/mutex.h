// mutex: locks that a compiler can check.
//
// A member says which mutex guards it (GUARDED_BY), and a function which mutex its caller holds
// (REQUIRES). Clang refuses an access without the lock (-Wthread-safety, part of `make check`);
// other compilers see nothing of all this. The classes are those of the standard library under
// names that carry the annotations.
//
// The analysis does not follow a mutex into a lambda. So waits are loops around Condition::wait,
// and a lambda that is called where the mutex is held says so with assert_held().
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__) && __clang_major__ >= 21  // which knows REQUIRES of a parameter
#define THREAD_SAFETY(attribute) __attribute__((attribute))
#else
#define THREAD_SAFETY(attribute)
#endif

// Of a class.
#define CAPABILITY(name) THREAD_SAFETY(capability(name))
#define SCOPED_CAPABILITY THREAD_SAFETY(scoped_lockable)
// Of a member.
#define GUARDED_BY(mutex) THREAD_SAFETY(guarded_by(mutex))
// Of a function; REQUIRES of a `Lock&`, too: it holds that mutex when the function is called, and
// when it returns.
#define REQUIRES(...) THREAD_SAFETY(requires_capability(__VA_ARGS__))
#define ACQUIRE(...) THREAD_SAFETY(acquire_capability(__VA_ARGS__))
#define TRY_ACQUIRE(...) THREAD_SAFETY(try_acquire_capability(__VA_ARGS__))
#define RELEASE(...) THREAD_SAFETY(release_capability(__VA_ARGS__))
#define ASSERT_HELD(...) THREAD_SAFETY(assert_capability(__VA_ARGS__))
#define RETURNS_MUTEX(mutex) THREAD_SAFETY(lock_returned(mutex))
#define NOT_ANALYSED THREAD_SAFETY(no_thread_safety_analysis)

namespace statehold {

class CAPABILITY("mutex") Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() ACQUIRE() { mutex_.lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }
  bool try_lock() TRY_ACQUIRE(true) { return mutex_.try_lock(); }
  // Tells the analysis, and nobody else, that the mutex is held.
  void assert_held() const ASSERT_HELD(this) {}

 private:
  friend class Lock;

  std::mutex mutex_;
};

// Holds a mutex until the end of its scope; may let go of it in between.
class SCOPED_CAPABILITY Lock {
 public:
  explicit Lock(Mutex& mutex) ACQUIRE(mutex) : lock_(mutex.mutex_) {}
  ~Lock() RELEASE() = default;
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  void lock() ACQUIRE() { lock_.lock(); }
  void unlock() RELEASE() { lock_.unlock(); }

 private:
  friend class Condition;

  std::unique_lock<std::mutex> lock_;
};

// May wake up without a cause, as all of them do: look again, in a loop.
class Condition {
 public:
  void wait(Lock& lock) { condition_.wait(lock.lock_); }
  // False: the deadline has passed.
  bool wait_until(Lock& lock, std::chrono::steady_clock::time_point deadline) {
    return condition_.wait_until(lock.lock_, deadline) == std::cv_status::no_timeout;
  }
  void notify_one() { condition_.notify_one(); }
  void notify_all() { condition_.notify_all(); }

 private:
  std::condition_variable condition_;
};

}  // namespace statehold
