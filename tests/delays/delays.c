/*
 * Delays threads at random around the system calls that they meet at: a library for LD_PRELOAD, built and run by
 * tests/delays/many_seeds.py.
 *
 * What a loaded machine does to a program once in a thousand runs, that a thread stands still between two steps while
 * all the others go on, happens here in most runs. Delayed are reads, writes, sends, receives, connect and accept, the
 * return from poll, and futexes taken through syscall(), which are parking_lot's locks and conditions, and the parked
 * threads of Rust's standard library. Nothing else is changed: not what a call does, nor what it returns, nor errno.
 *
 * Every thread draws how often it is delayed: never, or 2, 20 or 120 of 1,000 calls. With all alike, nobody would ever
 * be overtaken by much. One delay in 40 is up to 6 times as long as the others.
 *
 *   PENSTOCK_DELAYS_SEED     what is drawn follows from it and from the order in which threads make their first call; a
 *                            seed makes a failure likely again, not certain. Default: 0.
 *   PENSTOCK_DELAYS_MS       the longest usual delay in milliseconds. Default: 30.
 *   PENSTOCK_DELAYS_PER_PROCESS  if set, processes of one seed differ: the process id is mixed into it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MS_DEFAULT 30u
#define MS_MAX 10000u

static __thread uint64_t state;
static __thread unsigned delayed_of_1000;
static __thread int is_set_up;
static unsigned long threads;

/* SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014). */
static uint64_t draw(void)
{
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static uint64_t number(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

static void set_up(void)
{
    static const unsigned of_1000[] = {0, 2, 20, 120};
    is_set_up = 1;
    state = (number("PENSTOCK_DELAYS_SEED", 0) + 1) * 1000003u;
    state += __atomic_fetch_add(&threads, 1, __ATOMIC_RELAXED) * 7919u;
    if (getenv("PENSTOCK_DELAYS_PER_PROCESS"))
        state += (uint64_t)getpid() * 15485863u;
    draw();
    delayed_of_1000 = of_1000[draw() % 4];
}

static void delay(void)
{
    static unsigned ms;
    int error = errno;
    if (!is_set_up)
        set_up();
    if (draw() % 1000 < delayed_of_1000) {
        unsigned longest = __atomic_load_n(&ms, __ATOMIC_RELAXED);
        if (!longest) {
            uint64_t wanted = number("PENSTOCK_DELAYS_MS", MS_DEFAULT);
            longest = wanted < 1 ? 1 : wanted > MS_MAX ? MS_MAX : (unsigned)wanted;
            __atomic_store_n(&ms, longest, __ATOMIC_RELAXED);
        }
        uint64_t us = draw() % (longest * 1000u);
        if (draw() % 40 == 0)
            us *= 6;
        struct timespec time = {(time_t)(us / 1000000), (long)(us % 1000000) * 1000};
        nanosleep(&time, NULL);
    }
    errno = error;
}

/* The function that this one stands before. Who resolves it twice at once resolves the same. */
#define REAL(name)                                                                                                     \
    static __typeof__(name) *real;                                                                                     \
    if (!real)                                                                                                         \
    real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

#define DELAYED_BEFORE(result, name, parameters, arguments)                                                            \
    result name parameters                                                                                             \
    {                                                                                                                  \
        REAL(name);                                                                                                    \
        delay();                                                                                                       \
        return real arguments;                                                                                         \
    }

#define DELAYED_AFTER(result, name, parameters, arguments)                                                             \
    result name parameters                                                                                             \
    {                                                                                                                  \
        REAL(name);                                                                                                    \
        result value = real arguments;                                                                                 \
        delay();                                                                                                       \
        return value;                                                                                                  \
    }

#define DELAYED_AROUND(result, name, parameters, arguments)                                                            \
    result name parameters                                                                                             \
    {                                                                                                                  \
        REAL(name);                                                                                                    \
        delay();                                                                                                       \
        result value = real arguments;                                                                                 \
        delay();                                                                                                       \
        return value;                                                                                                  \
    }

DELAYED_BEFORE(ssize_t, read, (int fd, void *to, size_t bytes), (fd, to, bytes))
DELAYED_BEFORE(ssize_t, write, (int fd, const void *from, size_t bytes), (fd, from, bytes))
DELAYED_BEFORE(ssize_t, readv, (int fd, const struct iovec *to, int pieces), (fd, to, pieces))
DELAYED_BEFORE(ssize_t, writev, (int fd, const struct iovec *from, int pieces), (fd, from, pieces))
DELAYED_BEFORE(ssize_t, recvmsg, (int fd, struct msghdr *message, int flags), (fd, message, flags))
DELAYED_BEFORE(ssize_t, sendmsg, (int fd, const struct msghdr *message, int flags), (fd, message, flags))
DELAYED_AROUND(ssize_t, recv, (int fd, void *to, size_t bytes, int flags), (fd, to, bytes, flags))
DELAYED_AROUND(ssize_t, send, (int fd, const void *from, size_t bytes, int flags), (fd, from, bytes, flags))
DELAYED_BEFORE(int, connect, (int fd, const struct sockaddr *to, socklen_t bytes), (fd, to, bytes))
DELAYED_AFTER(int, accept4, (int fd, struct sockaddr *from, socklen_t *bytes, int flags), (fd, from, bytes, flags))
DELAYED_AFTER(int, poll, (struct pollfd * fds, nfds_t count, int ms), (fds, count, ms))

long syscall(long which, ...)
{
    static long (*real)(long, ...);
    if (!real)
        real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    va_list given;
    va_start(given, which);
    long a = va_arg(given, long), b = va_arg(given, long), c = va_arg(given, long);
    long d = va_arg(given, long), e = va_arg(given, long), f = va_arg(given, long);
    va_end(given);
    long value = real(which, a, b, c, d, e, f);
    if (which == SYS_futex)
        delay();
    return value;
}
