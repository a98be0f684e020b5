package main

import (
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// confFile lists our folders for ldconfig. The name is fixed, so that a restarted container has one and not many; it
// sorts first, so that the driver's libraries win over stubs in the image.
const confFile = "/etc/ld.so.conf.d/00-cgpu.conf"

// ldconfigs are the host's, the binary before Ubuntu's shell wrapper.
var ldconfigs = []string{"/sbin/ldconfig.real", "/usr/sbin/ldconfig.real", "/sbin/ldconfig", "/usr/sbin/ldconfig"}

// updateCache makes the container's dynamic linker find libraries in dirs: it becomes ldconfig, and comes back only with an
// error, or if there are no dirs. Images with musl ignore what it writes.
//
// The program is the host's, and it changes its root folder to the container's before it reads anything there, so that
// files of the image are data to it and links lead nowhere else.
func updateCache(r root, path string, dirs []string) error {
	if len(dirs) == 0 {
		return nil
	}
	if err := r.write(confFile, strings.Join(dirs, "\n")+"\n"); err != nil {
		return err
	}
	if err := includeConf(r); err != nil {
		return err
	}
	for _, ldconfig := range ldconfigs {
		if _, err := os.Stat(ldconfig); err != nil {
			continue
		}
		return become(ldconfig, path, 20*time.Second)
	}
	return fmt.Errorf("no ldconfig on the host, looked for %s", strings.Join(ldconfigs, ", "))
}

// become executes ldconfig in the hook's place, which saves a process and the wait for it. A pipe in the place of a file could
// hold it for ever, so a timer ends it.
func become(ldconfig, path string, limit time.Duration) error {
	// Without it ldconfig waits for the disk, for milliseconds at least. Where it cannot be had that is all that is lost.
	_ = leaveUnsynced(unix.SECCOMP_FILTER_FLAG_TSYNC)
	if _, err := unix.Setitimer(unix.ITIMER_REAL, unix.Itimerval{Value: unix.NsecToTimeval(limit.Nanoseconds())}); err != nil {
		return fmt.Errorf("setitimer: %w", err)
	}
	// It begins what it complains about with its name; so the engine's message tells whose it is.
	return fmt.Errorf("%s: %w", ldconfig, unix.Exec(ldconfig, []string{"cgpu-hook: " + ldconfig, "-r", path}, nil))
}

// includeConf gives an image without /etc/ld.so.conf one that reads ours: ldconfig knows of the folder only through it.
func includeConf(r root) error {
	fd, err := r.open("/etc/ld.so.conf", unix.O_PATH, 0)
	if err == nil {
		return unix.Close(fd)
	}
	if !os.IsNotExist(err) {
		return err
	}
	return r.write("/etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n")
}
