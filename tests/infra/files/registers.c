// Preloaded into User Mode Linux, on hosts whose processors have more state than it knows (AMX).
//
// Linux takes the state of a process whole or not at all (EFAULT). User Mode Linux gives the part
// that it knows. The rest is added here, as the process has it.

#include <elf.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { ROOM = 1 << 16, HEADER = 512 };
static const uint64_t TILES = UINT64_C(3) << 17;  // the state that lies beyond that part
static char whole[ROOM];

static long ask(long request, long pid, const void *address, void *data) {
  return syscall(SYS_ptrace, request, pid, address, data);
}

long ptrace(enum __ptrace_request request, ...) {
  va_list given_to;
  va_start(given_to, request);
  const long pid = va_arg(given_to, int);
  void *address = va_arg(given_to, void *), *data = va_arg(given_to, void *);
  va_end(given_to);
  struct iovec all = {whole, ROOM};
  if (request == PTRACE_SETREGSET && (uintptr_t)address == NT_X86_XSTATE &&
      ask(PTRACE_GETREGSET, pid, address, &all) == 0) {
    const struct iovec *part = data;
    if (part->iov_len < all.iov_len) {
      uint64_t held, given;
      memcpy(&held, whole + HEADER, sizeof held);
      memcpy(&given, (char *)part->iov_base + HEADER, sizeof given);
      memcpy(whole, part->iov_base, part->iov_len);
      given = (given & ~TILES) | (held & TILES);
      memcpy(whole + HEADER, &given, sizeof given);
      data = &all;
    }
  }
  if (request != PTRACE_PEEKTEXT && request != PTRACE_PEEKDATA && request != PTRACE_PEEKUSER)
    return ask(request, pid, address, data);
  long word;
  const long failed = ask(request, pid, address, &word);
  return failed ? failed : word;
}
