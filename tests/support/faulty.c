// faulty: stands between a process and libc (LD_PRELOAD), and lets the n-th call of a function on
// paths of a certain kind fail, do less than asked, or wait; also moves the wall clock.
//
// Owns one rule at a time, set from inside the process (support/faulty.py). A call counts when its
// function is the rule's (a name, or several between commas) and its path holds the rule's text;
// the path of a descriptor is looked up. Without a rule every call goes straight through.
// Leaves to others: what the kernel does by itself, and io_uring, which goes past libc.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

// FAIL: -1 with errno `value`. CUT: transfers at most `value` bytes. HOLD: waits for release.
// INTERRUPT: every other call fails with errno `value`, so that whoever tries again gets there.
// SKIP: nothing is done, and success is reported; for calls that transfer nothing.
enum Kind { COUNT = 0, FAIL = 1, CUT = 2, HOLD = 3, INTERRUPT = 4, SKIP = 5 };

static struct {
  char functions[256];
  char path[256];
  int nth;  // 0: every call
  enum Kind kind;
  int value;
  int calls, fired, released;
} rule;

static atomic_int armed;
static atomic_llong clock_offset_s;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

void faulty_arm(const char* functions, const char* path, int nth, int kind, int value) {
  pthread_mutex_lock(&mutex);
  memset(&rule, 0, sizeof rule);
  snprintf(rule.functions, sizeof rule.functions, ",%s,", functions);
  snprintf(rule.path, sizeof rule.path, "%s", path);
  rule.nth = nth;
  rule.kind = kind;
  rule.value = value;
  armed = 1;
  pthread_mutex_unlock(&mutex);
}

// Nobody is held from here on, and nothing counts.
void faulty_disarm(void) {
  pthread_mutex_lock(&mutex);
  armed = 0;
  rule.released = 1;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&mutex);
}

int faulty_calls(void) {
  pthread_mutex_lock(&mutex);
  const int calls = rule.calls;
  pthread_mutex_unlock(&mutex);
  return calls;
}

int faulty_fired(void) {
  pthread_mutex_lock(&mutex);
  const int fired = rule.fired;
  pthread_mutex_unlock(&mutex);
  return fired;
}

int faulty_wait_fired(int seconds) {
  struct timespec end;
  clock_gettime(CLOCK_MONOTONIC, &end);
  end.tv_sec += seconds;
  pthread_mutex_lock(&mutex);
  int result = 0;
  while (rule.fired == 0 && result == 0) {
    result = pthread_cond_clockwait(&changed, &mutex, CLOCK_MONOTONIC, &end);
  }
  const int fired = rule.fired;
  pthread_mutex_unlock(&mutex);
  return fired;
}

void faulty_set_clock(long long offset_s) { clock_offset_s = offset_s; }

static int applies(const char* function, const char* path) {
  char name[40];
  snprintf(name, sizeof name, ",%s,", function);
  return armed && strstr(rule.functions, name) != NULL && strstr(path, rule.path) != NULL;
}

// What becomes of a call: -1 to fail (errno is set), 0 to go on, or the most bytes to transfer; of a
// call that transfers nothing, more than 0 to leave it out.
static long decide(const char* function, const char* path) {
  long outcome = 0;
  pthread_mutex_lock(&mutex);
  if (applies(function, path)) {
    ++rule.calls;
    const int due = rule.kind == INTERRUPT ? rule.calls % 2 == 1
                                           : rule.nth == 0 || rule.nth == rule.calls;
    if (due && rule.kind != COUNT) {
      ++rule.fired;
      pthread_cond_broadcast(&changed);
      while (rule.kind == HOLD && !rule.released) pthread_cond_wait(&changed, &mutex);
      if (rule.kind == CUT) outcome = rule.value;
      if (rule.kind == SKIP) outcome = 1;
      if (rule.kind == FAIL || rule.kind == INTERRUPT) outcome = -1;
    }
  }
  const int error = rule.value;
  pthread_mutex_unlock(&mutex);
  if (outcome < 0) errno = error;
  return outcome;
}

static long decide_fd(const char* function, int fd) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = '\0';
  return decide(function, path);
}

#define REAL(name)                                             \
  static __typeof__(name)* real;                               \
  if (real == NULL) *(void**)&real = dlsym(RTLD_NEXT, #name)

#define PATH_CALL(name, parameters, path, arguments)         \
  int name parameters {                                      \
    REAL(name);                                              \
    if (armed && decide(#name, path) < 0) return -1;         \
    return real arguments;                                   \
  }

#define FD_CALL(name, as, parameters, arguments)             \
  int name parameters {                                      \
    REAL(name);                                              \
    const long outcome = armed ? decide_fd(as, fd) : 0;      \
    if (outcome != 0) return outcome < 0 ? -1 : 0;           \
    return real arguments;                                   \
  }

// A direct transfer of less than pages is refused, so more of them may be moved than is told.
#define WHOLE(bytes, unit) (((size_t)(bytes) + (unit)-1) / (unit) * (unit))
#define TRANSFER(name, as, unit, parameters, arguments)    \
  ssize_t name parameters {                                  \
    REAL(name);                                              \
    const long most = armed ? decide_fd(as, fd) : 0;         \
    if (most < 0) return -1;                                 \
    if (most > 0 && WHOLE(most, unit) < bytes) bytes = WHOLE(most, unit); \
    const ssize_t result = real arguments;                   \
    return most > 0 && result > most ? most : result;        \
  }

#define OPEN(name)                                           \
  int name(const char* path, int flags, ...) {               \
    REAL(name);                                              \
    va_list rest;                                            \
    va_start(rest, flags);                                   \
    const int creates = (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE; \
    const mode_t mode = creates ? va_arg(rest, mode_t) : 0;  \
    va_end(rest);                                            \
    if (armed && decide("open", path) < 0) return -1;        \
    return real(path, flags, mode);                          \
  }

OPEN(open)
OPEN(open64)
PATH_CALL(mkdir, (const char* path, mode_t mode), path, (path, mode))
PATH_CALL(unlink, (const char* path), path, (path))
PATH_CALL(rmdir, (const char* path), path, (path))
PATH_CALL(rename, (const char* from, const char* to), from, (from, to))
PATH_CALL(renameat2, (int at, const char* from, int to_at, const char* to, unsigned flags), from,
          (at, from, to_at, to, flags))

// Of a directory it is also called "fsync of directory".
static long decide_sync(int fd) {
  struct stat info;
  const long outcome = decide_fd("fsync", fd);
  const int is_directory = fstat(fd, &info) == 0 && S_ISDIR(info.st_mode);
  return outcome == 0 && is_directory ? decide_fd("fsync of directory", fd) : outcome;
}

int fsync(int fd) {
  REAL(fsync);
  const long outcome = armed ? decide_sync(fd) : 0;
  if (outcome != 0) return outcome < 0 ? -1 : 0;
  return real(fd);
}

FD_CALL(fdatasync, "fdatasync", (int fd), (fd))
FD_CALL(ftruncate, "ftruncate", (int fd, off_t bytes), (fd, bytes))
FD_CALL(ftruncate64, "ftruncate", (int fd, off64_t bytes), (fd, bytes))
FD_CALL(fallocate, "fallocate", (int fd, int mode, off_t at, off_t bytes), (fd, mode, at, bytes))
FD_CALL(fallocate64, "fallocate", (int fd, int mode, off64_t at, off64_t bytes),
        (fd, mode, at, bytes))
TRANSFER(write, "write", 1, (int fd, const void* memory, size_t bytes), (fd, memory, bytes))
TRANSFER(read, "read", 1, (int fd, void* memory, size_t bytes), (fd, memory, bytes))
TRANSFER(pwrite, "pwrite", 4096, (int fd, const void* memory, size_t bytes, off_t at),
         (fd, memory, bytes, at))
TRANSFER(pwrite64, "pwrite", 4096, (int fd, const void* memory, size_t bytes, off64_t at),
         (fd, memory, bytes, at))
TRANSFER(pread, "pread", 4096, (int fd, void* memory, size_t bytes, off_t at),
         (fd, memory, bytes, at))
TRANSFER(pread64, "pread", 4096, (int fd, void* memory, size_t bytes, off64_t at),
         (fd, memory, bytes, at))

int clock_gettime(clockid_t clock, struct timespec* now) {
  REAL(clock_gettime);
  const int result = real(clock, now);
  if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += clock_offset_s;
  return result;
}

int gettimeofday(struct timeval* restrict now, void* restrict zone) {
  REAL(gettimeofday);
  const int result = real(now, zone);
  now->tv_sec += clock_offset_s;
  return result;
}

time_t time(time_t* out) {
  REAL(time);
  const time_t now = real(NULL) + clock_offset_s;
  if (out != NULL) *out = now;
  return now;
}
