// A library for LD_PRELOAD: a file server whose metadata is slow and stale, below one directory.
//
// FLEX_SLOW_ROOT       the directory; calls on other paths are untouched
// FLEX_SLOW_MS         milliseconds that every call on metadata takes longer: open, stat, rename, unlink, mkdir, ...
// FLEX_SLOW_STALE_MS   milliseconds for which attributes of a path are those of the first look, as a client of NFS has
//                      them; a file that this process opens is looked at again, and what is absent is never remembered
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int is_below(const char* path) {
  const char* root = getenv("FLEX_SLOW_ROOT");
  if (root == NULL || path == NULL) return 0;
  char absolute[PATH_MAX];
  if (path[0] != '/') {
    if (getcwd(absolute, sizeof absolute) == NULL) return 0;
    size_t used = strlen(absolute);
    snprintf(absolute + used, sizeof absolute - used, "/%s", path);
    path = absolute;
  }
  return strncmp(path, root, strlen(root)) == 0;
}

static double milliseconds(const char* variable) {
  const char* value = getenv(variable);
  return value == NULL ? 0 : atof(value);
}

// Delay a call on metadata, and return whether it is one below the root.
static int slow(const char* path) {
  if (!is_below(path)) return 0;
  double wait = milliseconds("FLEX_SLOW_MS");
  struct timespec time = {(time_t)(wait / 1e3), (long)(wait * 1e6) % 1000000000};
  if (wait > 0) nanosleep(&time, NULL);
  return 1;
}

// ---- Attributes that are remembered

enum { REMEMBERED = 4096 };
static struct {
  char path[512];
  struct stat64 found;
  struct timespec when;
} remembered[REMEMBERED];
static pthread_mutex_t remembering = PTHREAD_MUTEX_INITIALIZER;

static unsigned slot_of(const char* path) {
  unsigned hash = 5381;
  for (const char* c = path; *c; ++c) hash = hash * 33 + (unsigned char)*c;
  return hash % REMEMBERED;
}

static int recall(const char* path, struct stat64* out) {
  double lifetime = milliseconds("FLEX_SLOW_STALE_MS");
  if (lifetime <= 0 || strlen(path) >= 512) return 0;
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  unsigned slot = slot_of(path);
  pthread_mutex_lock(&remembering);
  double age = (now.tv_sec - remembered[slot].when.tv_sec) * 1e3 + (now.tv_nsec - remembered[slot].when.tv_nsec) / 1e6;
  int is_known = strcmp(remembered[slot].path, path) == 0 && age < lifetime;
  if (is_known) *out = remembered[slot].found;
  pthread_mutex_unlock(&remembering);
  return is_known;
}

static void keep(const char* path, const struct stat64* found) {
  if (milliseconds("FLEX_SLOW_STALE_MS") <= 0 || strlen(path) >= 512) return;
  unsigned slot = slot_of(path);
  pthread_mutex_lock(&remembering);
  strcpy(remembered[slot].path, path);
  remembered[slot].found = *found;
  clock_gettime(CLOCK_MONOTONIC, &remembered[slot].when);
  pthread_mutex_unlock(&remembering);
}

static void forget(const char* path) {
  if (strlen(path) >= 512) return;
  unsigned slot = slot_of(path);
  pthread_mutex_lock(&remembering);
  if (strcmp(remembered[slot].path, path) == 0) remembered[slot].path[0] = '\0';
  pthread_mutex_unlock(&remembering);
}

// ---- The calls. Python calls the names with 64 where the C library has both.

#define OPENING(name)                                                \
  int name(const char* path, int flags, ...) {                       \
    va_list rest;                                                    \
    va_start(rest, flags);                                           \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0; \
    va_end(rest);                                                    \
    if (slow(path)) forget(path);                              \
    return NEXT(name)(path, flags, mode);                            \
  }
OPENING(open)
OPENING(open64)

#define LOOKING(name, type)                                          \
  int name(const char* path, struct type* out) {                     \
    if (!slow(path)) return NEXT(name)(path, out);             \
    if (recall(path, (struct stat64*)out)) return 0;                 \
    int failed = NEXT(name)(path, out);                              \
    if (!failed) keep(path, (struct stat64*)out);                    \
    return failed;                                                   \
  }
LOOKING(stat, stat)
LOOKING(stat64, stat64)
LOOKING(lstat, stat)
LOOKING(lstat64, stat64)

int fstatat64(int directory, const char* path, struct stat64* out, int flags) {
  if (directory == AT_FDCWD) slow(path);
  return NEXT(fstatat64)(directory, path, out, flags);
}

int access(const char* path, int mode) {
  slow(path);
  return NEXT(access)(path, mode);
}

#define CHANGING(name, parameters, path, arguments) \
  int name parameters {                             \
    slow(path);                             \
    return NEXT(name) arguments;                    \
  }
CHANGING(unlink, (const char* path), path, (path))
CHANGING(rmdir, (const char* path), path, (path))
CHANGING(mkdir, (const char* path, mode_t mode), path, (path, mode))
CHANGING(rename, (const char* from, const char* to), from, (from, to))
CHANGING(link, (const char* from, const char* to), from, (from, to))
CHANGING(symlink, (const char* from, const char* to), to, (from, to))

DIR* opendir(const char* path) {
  slow(path);
  return NEXT(opendir)(path);
}
