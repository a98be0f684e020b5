// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// The cases here keep the guard at work with what costs themselves little, for as long as --busy says. What the guard has used of a CPU
// meanwhile only somebody outside can tell (TestBusyGuard); without one they are skipped.

// busy makes an attack of a function that is called again and again, on several threads.
func busy(prepare func() (strike func() error, err error)) func(hostileOptions) error {
	return func(o hostileOptions) error {
		if o.busy == 0 {
			return skip("somebody must measure the guard: --busy")
		}
		_ = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 1 << 16, Max: 1 << 16})
		strike, err := prepare()
		if err != nil {
			return err
		}
		print("ready=1")
		end := time.Now().Add(o.busy)
		failures := make(chan error, busyThreads)
		var all sync.WaitGroup
		for range busyThreads {
			all.Go(func() {
				for time.Now().Before(end) {
					if err := strike(); err != nil {
						failures <- err
						return
					}
				}
			})
		}
		all.Wait()
		select {
		case err := <-failures:
			return err
		default:
			return nil
		}
	}
}

const (
	busyThreads = 4
	// manyThreads and manyFiles are what a process has at least at hand where nobody bounds it.
	manyThreads = 6000
	manyFiles   = 1000
)

// raw makes a call and does not look what came of it.
func raw(fd int, cmd uint32, arg unsafe.Pointer) syscall.Errno {
	_, _, e := syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), uintptr(cmd), uintptr(arg))
	return e
}

// noDriverCall has the low byte of RM_CONTROL and a size that the driver refuses.
const noDriverCall = 'T'<<8 | rm.EscControl

// busyStrangers: ioctls that are not the driver's, but have one of its low bytes.
func busyStrangers() (func() error, error) {
	fd, err := syscall.Open("/dev/null", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	return func() error {
		raw(fd, noDriverCall, nil)
		return nil
	}, err
}

// busyOthers: the driver's numbers on a file that is not the driver's.
func busyOthers() (func() error, error) {
	fd, err := syscall.Open("/dev/null", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	b := make([]byte, rm.ControlSize)
	return func() error {
		raw(fd, uint32(cmdOf(rm.EscControl, rm.ControlSize)), unsafe.Pointer(&b[0]))
		return nil
	}, err
}

// busyRefused: controls that the guard denies, and others that the driver refuses.
func busyRefused() (func() error, error) {
	c, err := openGPU(patient)
	if err != nil {
		return nil, err
	}
	return func() error {
		var refused *rmError
		for _, object := range []uint32{c.subdevice, 0x77777777} {
			for _, ctl := range []uint32{0x2080ffff, 0x20801238} {
				if err := c.control(object, ctl, make([]byte, 256)); !errors.As(err, &refused) {
					return fmt.Errorf("control %#x of object %#x: %w", ctl, object, err)
				}
			}
		}
		return nil
	}, nil
}

// busyRoots: RM clients on a file that has one.
func busyRoots() (func() error, error) {
	c, err := openGPU(patient)
	if err != nil {
		return nil, err
	}
	return func() error {
		out := make([]byte, allocSize)
		rm.PutU32(out, rm.AllocClass, classRootClient)
		patientEscape(c.fd, out)
		return nil
	}, nil
}

// controlFiles opens files that the guard follows.
func controlFiles(n int) (fds []int, err error) {
	for range n {
		fd, err := syscall.Open("/dev/nvidiactl", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
		if err != nil {
			return nil, err
		}
		b := make([]byte, rm.RegisterFDSize)
		rm.PutU32(b, rm.RegisterFDFD, uint32(fd))
		caller(patient).escape(fd, rm.EscRegisterFD, b)
		fds = append(fds, fd)
	}
	return fds, nil
}

// busyFiles: calls on each of many files.
func busyFiles() (func() error, error) {
	fds, err := controlFiles(manyFiles)
	return func() error {
		for _, fd := range fds {
			b := make([]byte, rm.RegisterFDSize)
			rm.PutU32(b, rm.RegisterFDFD, 1<<20)
			caller(patient).escape(fd, rm.EscRegisterFD, b)
		}
		return nil
	}, err
}

// busyThread: many threads have made calls and live, and new ones make one each.
func busyThread() (func() error, error) {
	debug.SetMaxThreads(4 * manyThreads)
	other, err := busyOthers()
	if err != nil {
		return nil, err
	}
	thread := func(then func()) {
		go func() {
			runtime.LockOSThread() // and never unlock it: the thread ends with this function
			_ = other()
			then()
		}()
	}
	var called sync.WaitGroup
	for range manyThreads {
		called.Add(1)
		thread(func() {
			called.Done()
			select {}
		})
	}
	called.Wait()
	return func() error {
		done := make(chan struct{})
		thread(func() { close(done) })
		<-done
		return nil
	}, nil
}

// busyProcesses: processes that make one call and end, while there are many files to be looked at.
func busyProcesses() (func() error, error) {
	if _, err := controlFiles(manyFiles - 24); err != nil {
		return nil, err
	}
	fd, err := syscall.Open("/dev/null", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	b := make([]byte, rm.ControlSize)
	cmd := cmdOf(rm.EscControl, rm.ControlSize)
	return func() error {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		pid, e := forkAndCall(fd, cmd, unsafe.Pointer(&b[0]))
		if e != 0 {
			return fmt.Errorf("fork: %w", e)
		}
		_, err := syscall.Wait4(pid, nil, 0, nil)
		return err
	}, nil
}

// forkAndCall makes a process that makes one ioctl and ends. It may use nothing of Go's.
//
//go:norace
//go:nosplit
func forkAndCall(fd int, cmd uintptr, arg unsafe.Pointer) (int, syscall.Errno) {
	pid, _, e := syscall.RawSyscall6(syscall.SYS_CLONE, uintptr(syscall.SIGCHLD), 0, 0, 0, 0, 0)
	if e == 0 && pid == 0 {
		syscall.RawSyscall(syscall.SYS_IOCTL, uintptr(fd), cmd, uintptr(arg))
		syscall.RawSyscall(syscall.SYS_EXIT_GROUP, 0, 0, 0)
	}
	return int(pid), e
}
