/* Loaded before libc: every clock that shows the time of day is CLOCK_OFFSET seconds off, file times
 * too, as on a machine whose clock is wrong. (libfaketime 0.9.10 breaks Python's sleep.) */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>

static long offset(void) {
    const char *text = getenv("CLOCK_OFFSET");
    return text ? atol(text) : 0;
}

#define REAL(type, name) \
    static __typeof__(type) real; \
    if (!real) real = (__typeof__(real))dlsym(RTLD_NEXT, name)

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(int (*)(clockid_t, struct timespec *), "clock_gettime");
    int result = real(clock, now);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += offset();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    REAL(int (*)(struct timeval *, void *), "gettimeofday");
    int result = real(now, zone);
    if (!result) now->tv_sec += offset();
    return result;
}

time_t time(time_t *now) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now) *now = found.tv_sec;
    return found.tv_sec;
}

#define SHIFTED(result, status)                   \
    if (!(result)) {                              \
        (status)->st_atim.tv_sec += offset();     \
        (status)->st_mtim.tv_sec += offset();     \
        (status)->st_ctim.tv_sec += offset();     \
    }                                             \
    return result

#define BY_PATH(name, kind)                                  \
    int name(const char *path, struct kind *status) {        \
        REAL(int (*)(const char *, struct kind *), #name);   \
        int result = real(path, status);                     \
        SHIFTED(result, status);                             \
    }
#define BY_FILE(name, kind)                                  \
    int name(int file, struct kind *status) {                \
        REAL(int (*)(int, struct kind *), #name);            \
        int result = real(file, status);                     \
        SHIFTED(result, status);                             \
    }
#define BELOW(name, kind)                                                    \
    int name(int folder, const char *path, struct kind *status, int flags) { \
        REAL(int (*)(int, const char *, struct kind *, int), #name);         \
        int result = real(folder, path, status, flags);                      \
        SHIFTED(result, status);                                             \
    }
BY_PATH(stat, stat)
BY_PATH(lstat, stat)
BY_FILE(fstat, stat)
BELOW(fstatat, stat)
BY_PATH(stat64, stat64)
BY_PATH(lstat64, stat64)
BY_FILE(fstat64, stat64)
BELOW(fstatat64, stat64)

static const struct timespec *back(const struct timespec given[2], struct timespec made[2]) {
    if (!given) return NULL;
    for (int n = 0; n < 2; n++) {
        made[n] = given[n];
        if (given[n].tv_nsec != UTIME_NOW && given[n].tv_nsec != UTIME_OMIT)
            made[n].tv_sec -= offset();
    }
    return made;
}

int utimensat(int folder, const char *path, const struct timespec times[2], int flags) {
    REAL(int (*)(int, const char *, const struct timespec *, int), "utimensat");
    struct timespec made[2];
    return real(folder, path, back(times, made), flags);
}

int futimens(int file, const struct timespec times[2]) {
    REAL(int (*)(int, const struct timespec *), "futimens");
    struct timespec made[2];
    return real(file, back(times, made));
}
