/* Preloaded into user-mode Linux, which before 6.13 gives the floating point state of a process back to the host in a buffer
 * of 2696 bytes. A processor with more of it (AMX) has a host that takes it whole or not at all (PTRACE_SETREGSET: EFAULT, and
 * the guest panics at its first process). What is lacking is state that nobody in the guest uses: zeros. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/uio.h>

typedef long call(int request, pid_t pid, void *address, void *data);

long ptrace(enum __ptrace_request request, ...) {
    static call *host;
    static char state[65536];
    static size_t size;
    va_list arguments;
    va_start(arguments, request);
    pid_t pid = va_arg(arguments, pid_t);
    void *address = va_arg(arguments, void *);
    void *data = va_arg(arguments, void *);
    va_end(arguments);
    if (!host)
        host = (call *)dlsym(RTLD_NEXT, "ptrace");
    if (request != PTRACE_SETREGSET || (long)address != NT_X86_XSTATE)
        return host(request, pid, address, data);
    struct iovec *given = data, whole = {state, sizeof state};
    if (!size) {
        if (host(PTRACE_GETREGSET, pid, address, &whole) < 0)
            return -1;
        size = whole.iov_len;
    }
    if (given->iov_len >= size)
        return host(request, pid, address, data);
    memcpy(state, given->iov_base, given->iov_len);
    memset(state + given->iov_len, 0, size - given->iov_len);
    whole.iov_len = size;
    return host(request, pid, address, &whole);
}
