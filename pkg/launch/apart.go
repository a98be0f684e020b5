package launch

import (
	"errors"
	"fmt"
	"os"
	"runtime"
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
	runtime.LockOSThread() // whose nice value and policy the guard has
	settle()
	pid, err := spawn(path, []string{"cgpu-guard"}, os.Environ(), []int{0, 1, 2, 3})
	if err != nil {
		fmt.Fprintf(answer, "start %s: %v", path, err)
		return err
	}
	_, err = fmt.Fprint(answer, pid)
	return err
}

// guardLimits are those of a run's guard. The caller's are his own, and could be so low that the guard ends or opens nothing.
var guardLimits = []struct {
	resource int
	limit    uint64
}{
	{unix.RLIMIT_NOFILE, 1 << 19}, // as systemd's
	{unix.RLIMIT_FSIZE, unix.RLIM_INFINITY},
	{unix.RLIMIT_CPU, unix.RLIM_INFINITY},
	{unix.RLIMIT_AS, unix.RLIM_INFINITY},
	{unix.RLIMIT_DATA, unix.RLIM_INFINITY},
	{unix.RLIMIT_CORE, 0},
}

// settle gives this thread and what it starts the limits and the priority of a daemon. What is not allowed (in a container,
// root may not raise a hard limit) is left out: the soft one then goes as high as the hard one.
func settle() {
	for _, l := range guardLimits {
		if syscall.Setrlimit(l.resource, &syscall.Rlimit{Cur: l.limit, Max: l.limit}) == nil {
			continue
		}
		var have syscall.Rlimit
		if syscall.Getrlimit(l.resource, &have) == nil {
			have.Cur = min(l.limit, have.Max)
			_ = syscall.Setrlimit(l.resource, &have)
		}
	}
	_ = unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_NORMAL}, 0) // nice 0
}
