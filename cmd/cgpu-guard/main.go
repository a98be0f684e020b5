// SPDX-License-Identifier: Apache-2.0

// Command cgpu-guard answers the NVIDIA driver calls of one container.
//
// cgpu-runtime starts it before the container is created: the guard.Config as JSON on standard input, and a pipe on
// descriptor 3 for one line, "ok" once its sockets listen, else the reason why it cannot serve. It ends by itself when the
// container's last process is gone. Nobody else has reason to run it.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/arbiter/process"
	"github.com/opencgpu/cgpu/pkg/domain"
	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/guard"
	"github.com/opencgpu/cgpu/pkg/guard/driver"
	"github.com/opencgpu/cgpu/pkg/guard/handover"
	"github.com/opencgpu/cgpu/pkg/guard/keeper"
	"github.com/opencgpu/cgpu/pkg/ledger"
)

// readyFD is where cgpu-runtime waits for the verdict.
const readyFD = 3

// maxConfig bounds the configuration; eight GPUs take 4 KiB.
const maxConfig = 1 << 20

func main() {
	switch filepath.Base(os.Args[0]) {
	case gpusched.RescueName:
		rescueMain()
		return
	case process.Name:
		arbiterMain()
		return
	}
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case handover.StartArg:
			exitWith(handover.ServeStart())
			return
		case handover.TryArg:
			tryMain()
			return
		case handover.TakeArg:
			exitWith(takeMain(os.Args[2:]))
			return
		case keeper.ReviveArg:
			exitWith(reviveMain(os.Args[2:]))
			return
		}
	}
	unix.CloseOnExec(readyFD) // whoever is started before the verdict must not hold it open
	ready := os.NewFile(readyFD, "ready")
	g, sockets, cfg, log, err := start()
	if err != nil {
		if ready != nil {
			fmt.Fprintln(ready, err)
		}
		fmt.Fprintln(os.Stderr, "cgpu-guard:", err)
		os.Exit(1)
	}
	if ready != nil {
		fmt.Fprintln(ready, "ok")
		_ = ready.Close()
	}
	// The container is being created meanwhile; it waits for its first call until Run.
	g.Arm(process.Start)
	exitWith(serve(g, sockets, cfg, log, dropPrivileges()))
}

func exitWith(err error) {
	if err != nil {
		os.Exit(1)
	}
}

// serve serves the container until it is over, unless something was wrong before.
func serve(g *guard.Guard, sockets guard.Sockets, cfg guard.Config, log *guardLog, err error) error {
	if err == nil {
		time.AfterFunc(leisure, func() { _ = sweep(cfg) })
		err = g.Run(sockets)
	}
	cfg.CleanUp()
	if err = errors.Join(err, sweep(cfg)); err != nil {
		log.Error("end", "err", err)
	} else {
		log.Info("the container is over")
	}
	log.close()
	return err
}

// leisure is when no container's start waits for this process any more.
const leisure = 10 * time.Second

// sweep removes what others that were killed have left.
func sweep(cfg guard.Config) error {
	_, err := ledger.Open(cfg.RunDir).Sweep()
	return err
}

// start gets ready to serve. The order matters: everything that needs root's powers comes before dropPrivileges (in main),
// every byte of a container after.
func start() (*guard.Guard, guard.Sockets, guard.Config, *guardLog, error) {
	var cfg guard.Config
	var sockets guard.Sockets
	bad := func(err error) (*guard.Guard, guard.Sockets, guard.Config, *guardLog, error) {
		return nil, sockets, cfg, nil, err
	}
	// What json learns of the type it learns while nobody waits: cgpu-runtime is still reading the node's table and the ledger.
	_ = json.Unmarshal([]byte("{}"), new(guard.Config))
	b, err := io.ReadAll(io.LimitReader(os.Stdin, maxConfig))
	if err != nil {
		return bad(fmt.Errorf("read the configuration: %w", err))
	}
	if err := json.Unmarshal(b, &cfg); err != nil {
		return bad(fmt.Errorf("parse the configuration on standard input: %w; cgpu-guard is started by cgpu-runtime only", err))
	}
	tune()
	if err := detach(); err != nil {
		return bad(err)
	}
	log := newLog(cfg.Log)
	if err := os.MkdirAll(filepath.Dir(cfg.Socket), 0o700); err != nil {
		return bad(fmt.Errorf("make the socket folder: %w", err))
	}
	if sockets, err = guard.Listen(cfg); err != nil {
		return bad(err)
	}
	d, err := driver.Open(cfg)
	if err != nil {
		cfg.CleanUp()
		return bad(err)
	}
	g, err := guard.New(cfg, d, log.Logger)
	if err == nil {
		err = domain.Join(cfg)
	}
	if err != nil {
		cfg.CleanUp()
		return bad(err)
	}
	return g, sockets, cfg, log, nil
}

// tune keeps a process small that mostly waits.
func tune() {
	runtime.GOMAXPROCS(min(4, runtime.NumCPU()))
	debug.SetGCPercent(50)
	debug.SetMemoryLimit(256 << 20)
}

// detach makes the guard independent of the shim that started the runtime: nothing of the engine's may be held open, and
// the kernel's out-of-memory killer should look elsewhere first, as it does for containerd's shims (-998).
func detach() error {
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	for fd := range 3 {
		if err := unix.Dup3(int(null.Fd()), fd, 0); err != nil {
			return fmt.Errorf("detach from descriptor %d: %w", fd, err)
		}
	}
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte(strconv.Itoa(-998)), 0)
	return os.Chdir("/")
}
