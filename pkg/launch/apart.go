// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
)

// pidFD is where the helper of StartApart tells the guard's process id.
const pidFD = 4

// StartApart is Start for a process that will become a program that knows nothing of guards: the guard must not be its
// child, or whoever waits there for all children waits for the guard, which waits for them. So a helper starts it and ends.
// helper is the command line of that helper, which calls Apart.
func StartApart(runDir string, helper []string) (*Guard, error) {
	return start(func(files []int) (int, error) {
		var said [2]int
		if err := unix.Pipe2(said[:], unix.O_CLOEXEC); err != nil {
			return 0, fmt.Errorf("launch: pipe: %w", err)
		}
		defer unix.Close(said[0])
		pid, err := spawn(helper[0], helper, guardEnv(runDir), append(files, said[1]))
		unix.Close(said[1])
		if err != nil {
			return 0, fmt.Errorf("launch: start %s: %w", helper[0], err)
		}
		var text [256]byte
		n := 0
		for {
			more, err := unix.Read(said[0], text[n:])
			if more > 0 {
				n += more
			} else if !errors.Is(err, unix.EINTR) {
				break
			}
		}
		var status syscall.WaitStatus
		for {
			if _, err := syscall.Wait4(pid, &status, 0, nil); !errors.Is(err, syscall.EINTR) {
				break
			}
		}
		guard, err := strconv.Atoi(string(text[:n]))
		if err != nil || guard <= 0 {
			return 0, fmt.Errorf("launch: the guard was not started: %s", oneLine(string(text[:n])))
		}
		return guard, nil
	})
}

// Apart is the helper: it starts cgpu-guard with its own descriptors and tells its process id, or why there is none. leave is
// called before, to take the guard out of what ends with the caller's session.
func Apart(leave func()) error {
	answer := os.NewFile(pidFD, "answer")
	if answer == nil {
		return errors.New("launch: started by cgpu run only")
	}
	defer answer.Close()
	unix.CloseOnExec(pidFD)
	path, err := device.Program("cgpu-guard")
	if err != nil {
		return err
	}
	leave()
	// Go gives a child the soft limit of descriptors that this process began with, unless it was set by this call.
	var files syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files) == nil {
		_ = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &files)
	}
	pid, err := spawn(path, []string{"cgpu-guard"}, os.Environ(), []int{0, 1, 2, 3})
	if err != nil {
		fmt.Fprintf(answer, "start %s: %v", path, err)
		return err
	}
	_, err = fmt.Fprint(answer, pid)
	return err
}
