// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"kernel.org/pub/linux/libs/security/libcap/cap"

	"github.com/opencgpu/cgpu/pkg/arbiter/process"
	"github.com/opencgpu/cgpu/pkg/guard"
	"github.com/opencgpu/cgpu/pkg/guard/driver"
	"github.com/opencgpu/cgpu/pkg/guard/handover"
	"github.com/opencgpu/cgpu/pkg/rmclient"
)

// tryMain makes a guard of another one's state, to see whether it can be done (cgpu upgrade). Nothing of the container is touched: it has
// no descriptor of that guard's but the state, and no capability but the one to make that guard urgent (handover.Trial.MakeUrgent).
func tryMain() {
	tune()
	err := keepNice()
	if err == nil {
		err = handover.ServeTry(func(s *handover.State) (err error) {
			defer caught(&err)
			_, err = guard.Restore(s, rmclient.Kernel{}, slog.New(slog.DiscardHandler))
			return err
		})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "cgpu-guard:", err)
		os.Exit(1)
	}
}

// keepNice drops all capabilities but CAP_SYS_NICE, which root may lack.
func keepNice() error {
	only := cap.NewSet()
	has, err := cap.GetProc().GetFlag(cap.Permitted, cap.SYS_NICE)
	return errors.Join(err, only.SetFlag(cap.Permitted, has, cap.SYS_NICE), only.SetFlag(cap.Effective, has, cap.SYS_NICE), only.SetProc())
}

// caught makes an error of a panic.
func caught(err *error) {
	if r := recover(); r != nil {
		*err = fmt.Errorf("panic: %v", r)
	}
}

// takeTime is how long it may take to go on in the place of another program; then that one gets the process back.
const takeTime = 5 * time.Second

// takeMain goes on as the guard of a container in the place of the program that has executed this one. The container's calls wait until it
// serves, so it has one processor and few threads until then.
func takeMain(args []string) error {
	t, err := handover.Take(args)
	if t == nil {
		return err
	}
	if err != nil {
		return t.Back(fmt.Errorf("the other program could not go on: %w", err))
	}
	log := newLogOf(t.Config.Log, maxLog/8) // each hand-over may add so much
	var g *guard.Guard
	var sockets guard.Sockets
	if err := t.Within(takeTime, func() (err error) {
		g, sockets, err = takeOver(t.State, log.Logger)
		return err
	}); err != nil {
		err = t.Back(fmt.Errorf("the other program could not go on: %w", err))
		log.Error("no program can go on with the container: this guard ends", "err", err)
		return err
	}
	t.Keep()
	_ = os.WriteFile("/proc/self/comm", []byte("cgpu-guard"), 0) // it was executed by the number of a descriptor
	tune()
	if t.Failed != "" {
		log.Warn("the guard is the program that it was", "err", t.Failed)
	}
	go guard.AnswerUpgrade(t.State, t.Failed)
	return serve(g, sockets, t.Config, log, nil)
}

// takeOver is start for a guard whose container runs.
func takeOver(s *handover.State, log *slog.Logger) (g *guard.Guard, sockets guard.Sockets, err error) {
	defer caught(&err)
	var conn *os.File
	if s.Process.Sim > 0 {
		if conn, err = handover.Copy(s.Process.Sim, "driver"); err != nil {
			return nil, sockets, err
		}
		defer conn.Close()
	}
	d, err := driver.Resume(s.Config, conn, s.Process.SimNext)
	if err != nil {
		return nil, sockets, err
	}
	if g, sockets, err = guard.TakeOver(s, d, log); err != nil {
		return nil, sockets, err
	}
	g.Arm(process.Start)
	return g, sockets, dropPrivileges()
}
