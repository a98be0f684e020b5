// LD_PRELOAD library that writes down what a program asks of NVIDIA's driver (RM and UVM), with parameters before and after the call, and
// what it says to other processes over unix sockets and pipes: bytes, credentials, and which descriptors go along. Calls that a program
// makes without libc, as static ones do, are not seen.
//   RMTRACE=FOLDER   one file for each process, NAME.PID; without it nothing is written
// Build: cc -O1 -shared -fPIC -o rmtrace.so rmtrace.c -ldl. Lines are read by ../rmtrace.py:
//   SECONDS NAME[PID] KIND key=value…
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { ALLOC = 0x2b, CONTROL = 0x2a, XFER = 0xd3, UVM_MAP_EXTERNAL = 33, UVM_MAP_TAIL = 9248, MARK = 0x4d41524b, MOST = 128, FDS = 4096 };

static unsigned char talks[FDS]; // descriptors of sockets and pipes that are written down

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

static void line(const char *format, ...) {
  const char *folder = getenv("RMTRACE");
  char path[512], text[4096];
  if (!folder) return;
  int kept = errno;
  snprintf(path, sizeof path, "%s/%s.%d", folder, program_invocation_short_name, (int)getpid());
  int n = snprintf(text, sizeof text, "%.6f %s[%d] ", now(), program_invocation_short_name, (int)getpid());
  va_list list;
  va_start(list, format);
  n += vsnprintf(text + n, sizeof text - (size_t)n, format, list);
  va_end(list);
  if (n > (int)sizeof text - 2) n = sizeof text - 2;
  text[n++] = '\n';
  // Opened anew for each line: a daemon closes what it does not know.
  int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd >= 0) {
    if (syscall(SYS_write, fd, text, (size_t)n) < 0) fprintf(stderr, "rmtrace: cannot write %s\n", path);
    syscall(SYS_close, fd);
  }
  errno = kept;
}

// Copies memory that may not be there. Where an engine's filter forbids to ask, it is believed to be there.
static size_t copy(void *to, uint64_t from, size_t n) {
  struct iovec here = {to, n}, there = {(void *)(uintptr_t)from, n};
  if (!from || !n) return 0;
  ssize_t got = syscall(SYS_process_vm_readv, getpid(), &here, 1UL, &there, 1UL, 0UL);
  if (got < 0 && (errno == EPERM || errno == ENOSYS)) {
    memcpy(to, (const void *)(uintptr_t)from, n);
    return n;
  }
  if (got < 0 && n > 16) return copy(to, from, 16); // near the end of a page
  return got < 0 ? 0 : (size_t)got;
}

static const char *hex(char *to, const void *from, size_t n) {
  char *p = to;
  for (size_t i = 0; i < n; i++) p += sprintf(p, "%02x", ((const unsigned char *)from)[i]);
  *p = 0;
  return n ? to : "-";
}

static uint32_t u32(const char *p) { uint32_t v; memcpy(&v, p, 4); return v; }
static uint64_t u64(const char *p) { uint64_t v; memcpy(&v, p, 8); return v; }

static const char *file(char *to, size_t size, int fd) {
  char link[40];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, to, size - 1);
  to[n > 0 ? n : 0] = 0;
  return n > 0 ? to : "?";
}

// What a call leads to, as it is in memory now.
struct seen {
  char outer[MOST], inner[MOST];
  size_t outerSize, innerSize;
};

static void look(struct seen *s, uint32_t nr, uint64_t arg, size_t size) {
  s->innerSize = 0;
  s->outerSize = copy(s->outer, arg, size < MOST ? size : MOST);
  if ((nr != ALLOC && nr != CONTROL) || s->outerSize < 32) return;
  size_t want = nr == CONTROL ? u32(s->outer + 24) : MOST; // of an allocation the class says how much it is
  s->innerSize = copy(s->inner, u64(s->outer + 16), want < MOST ? want : MOST);
}

static int traced(int fd, unsigned long cmd, void *arg) {
  static const char *const kinds[] = {"rm", "uvm"};
  char name[256], a[2 * MOST + 1], b[2 * MOST + 1], c[2 * MOST + 1], d[2 * MOST + 1], tail[33] = "";
  file(name, sizeof name, fd);
  int uvm = strncmp(name, "/dev/nvidia-uvm", 15) == 0;
  if (!uvm && strncmp(name, "/dev/nvidia", 11) != 0) return (int)syscall(SYS_ioctl, fd, cmd, arg);
  uint32_t nr = uvm ? (uint32_t)cmd : cmd & 0xff;
  uint64_t at = (uintptr_t)arg;
  size_t size = uvm ? 64 : cmd >> 16 & 0x3fff;
  char xfer[16];
  if (!uvm && nr == XFER && copy(xfer, at, 16) == 16) nr = u32(xfer), size = u32(xfer + 4), at = u64(xfer + 8);
  struct seen before, after;
  look(&before, nr, at, size);
  double begin = now();
  int r = (int)syscall(SYS_ioctl, fd, cmd, arg), kept = errno;
  double took = now() - begin;
  look(&after, nr, at, size);
  if (uvm && nr == UVM_MAP_EXTERNAL) {
    char end[16];
    hex(tail, end, copy(end, at + UVM_MAP_TAIL, 16));
  }
  line("%s nr=%#x size=%zu file=%s fd=%d rc=%d errno=%d us=%.0f in=%s out=%s pin=%s pout=%s%s%s", kinds[uvm], nr, size, name, fd, r, r < 0 ? kept : 0,
       took * 1e6, hex(a, before.outer, before.outerSize), hex(b, after.outer, after.outerSize), hex(c, before.inner, before.innerSize),
       hex(d, after.inner, after.innerSize), *tail ? " tail=" : "", tail);
  errno = kept;
  return r;
}

int ioctl(int fd, unsigned long cmd, ...) {
  va_list list;
  va_start(list, cmd);
  void *arg = va_arg(list, void *);
  va_end(list);
  if (fd == -1 && cmd == MARK) { // the workload says what it does next
    line("mark %s", (const char *)arg);
    return 0;
  }
  return traced(fd, cmd, arg);
}

static void track(int fd) {
  if (fd >= 0 && fd < FDS) talks[fd] = 1;
}

static int tracked(int fd) { return fd >= 0 && fd < FDS && talks[fd]; }

static void said(const char *what, int fd, const void *bytes, ssize_t n) {
  char text[2 * 64 + 1];
  if (tracked(fd)) line("say what=%s fd=%d n=%zd bytes=%s", what, fd, n, hex(text, bytes, n < 0 ? 0 : n > 64 ? 64 : (size_t)n));
}

static void saidMessage(const char *what, int fd, const struct msghdr *m, ssize_t n) {
  if (!tracked(fd)) return;
  if (m->msg_iovlen > 0) said(what, fd, m->msg_iov[0].iov_base, n < (ssize_t)m->msg_iov[0].iov_len ? n : (ssize_t)m->msg_iov[0].iov_len);
  for (struct cmsghdr *c = n < 0 ? NULL : CMSG_FIRSTHDR(m); c; c = CMSG_NXTHDR((struct msghdr *)m, c)) {
    if (c->cmsg_level != SOL_SOCKET) continue;
    if (c->cmsg_type == SCM_RIGHTS) {
      for (size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); i++) {
        int sent;
        char name[256];
        memcpy(&sent, CMSG_DATA(c) + i * sizeof sent, sizeof sent);
        line("pass what=%s fd=%d sent=%d file=%s", what, fd, sent, file(name, sizeof name, sent));
      }
    } else if (c->cmsg_type == SCM_CREDENTIALS) {
      struct ucred who;
      memcpy(&who, CMSG_DATA(c), sizeof who);
      line("pass what=%s fd=%d pid=%d uid=%d gid=%d", what, fd, who.pid, who.uid, who.gid);
    }
  }
}

// libc's own, not a system call: threads may be cancelled in them.
#define NEXT(name)                                                          \
  ({                                                                        \
    static __typeof__(&name) next;                                          \
    if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name);           \
    next;                                                                   \
  })

static void met(const char *what, int fd, const struct sockaddr *to, socklen_t size, int r) {
  if (to && to->sa_family == AF_UNIX) {
    const struct sockaddr_un *u = (const struct sockaddr_un *)to;
    int n = (int)size - (int)offsetof(struct sockaddr_un, sun_path);
    line("%s fd=%d rc=%d path=%s%.*s", what, fd, r, n > 0 && !u->sun_path[0] ? "@" : "", n > 0 ? n - !u->sun_path[0] : 0, u->sun_path + (n > 0 && !u->sun_path[0]));
    track(fd);
  }
}

int connect(int fd, const struct sockaddr *to, socklen_t size) {
  int r = NEXT(connect)(fd, to, size);
  met("connect", fd, to, size, r);
  return r;
}

int bind(int fd, const struct sockaddr *to, socklen_t size) {
  int r = NEXT(bind)(fd, to, size);
  met("bind", fd, to, size, r);
  return r;
}

int accept(int fd, struct sockaddr *from, socklen_t *size) {
  int r = NEXT(accept)(fd, from, size);
  if (tracked(fd)) line("accept fd=%d rc=%d", fd, r), track(r);
  return r;
}

int accept4(int fd, struct sockaddr *from, socklen_t *size, int flags) {
  int r = NEXT(accept4)(fd, from, size, flags);
  if (tracked(fd)) line("accept fd=%d rc=%d", fd, r), track(r);
  return r;
}

int socketpair(int domain, int type, int protocol, int ends[2]) {
  int r = NEXT(socketpair)(domain, type, protocol, ends);
  if (r == 0) line("socketpair fd=%d and=%d", ends[0], ends[1]), track(ends[0]), track(ends[1]);
  return r;
}

int close(int fd) {
  if (tracked(fd)) line("close fd=%d", fd), talks[fd] = 0;
  return NEXT(close)(fd);
}

ssize_t sendmsg(int fd, const struct msghdr *m, int flags) {
  ssize_t n = NEXT(sendmsg)(fd, m, flags);
  saidMessage("sendmsg", fd, m, n);
  return n;
}

ssize_t recvmsg(int fd, struct msghdr *m, int flags) {
  ssize_t n = NEXT(recvmsg)(fd, m, flags);
  saidMessage("recvmsg", fd, m, n);
  return n;
}

ssize_t send(int fd, const void *p, size_t size, int flags) {
  ssize_t n = NEXT(send)(fd, p, size, flags);
  said("send", fd, p, n);
  return n;
}

ssize_t recv(int fd, void *p, size_t size, int flags) {
  ssize_t n = NEXT(recv)(fd, p, size, flags);
  said("recv", fd, p, n);
  return n;
}

ssize_t write(int fd, const void *p, size_t size) {
  ssize_t n = NEXT(write)(fd, p, size);
  said("write", fd, p, n);
  return n;
}

ssize_t read(int fd, void *p, size_t size) {
  ssize_t n = NEXT(read)(fd, p, size);
  said("read", fd, p, n);
  return n;
}

static int opened(const char *path, int flags, int fd) {
  if (!strstr(path, "nvidia") && !strstr(path, "mps") && !strstr(path, "/shm/")) return fd;
  line("open path=%s flags=%#x fd=%d", path, (unsigned)flags, fd);
  const char *base = strrchr(path, '/');
  if (base && (!strcmp(base, "/log") || !strcmp(base, "/control") || !strncmp(base, "/control_", 9))) track(fd);
  return fd;
}

static int openAs(int at, const char *path, int flags, va_list list) {
  int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, int) : 0;
  return opened(path, flags, (int)syscall(SYS_openat, at, path, flags, mode));
}

#define OPEN(name, ...)                      \
  int name(__VA_ARGS__, int flags, ...) {    \
    va_list list;                            \
    va_start(list, flags);                   \
    int fd = openAs(AT, path, flags, list);  \
    va_end(list);                            \
    return fd;                               \
  }
#define AT AT_FDCWD
OPEN(open, const char *path)
OPEN(open64, const char *path)
#undef AT
#define AT at
OPEN(openat, int at, const char *path)
OPEN(openat64, int at, const char *path)

__attribute__((constructor)) static void loaded(void) {
  line("loaded uid=%d ppid=%d", (int)geteuid(), (int)getppid());
}
