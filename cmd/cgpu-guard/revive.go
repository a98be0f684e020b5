// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"time"

	"github.com/opencgpu/cgpu/pkg/arbiter/process"
	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/guard"
	"github.com/opencgpu/cgpu/pkg/guard/driver"
	"github.com/opencgpu/cgpu/pkg/guard/handover"
)

// reviveMain goes on in the place of a guard that was killed, in what was its keeper. Whatever fails, the container is as it would be
// without: its driver calls fail, and what was paused runs.
func reviveMain(args []string) error {
	_ = os.WriteFile("/proc/self/comm", []byte("cgpu-guard"), 0)
	tune()
	if len(args) != 1 {
		return errors.New("it is executed by cgpu-guard only")
	}
	fd, err := strconv.Atoi(args[0])
	if err != nil {
		return fmt.Errorf("descriptor %.20q", args[0])
	}
	f, err := guard.ReadFallen(fd)
	if f == nil || f.Config.Log == "" { // it is not known whose log to write to
		return err
	}
	log := newLogOf(f.Config.Log, maxLog/8) // each one may add so much
	g, sockets, err := rise(f, err, log.Logger)
	if err != nil {
		log.Error("the guard was killed, and nobody can go on in its place: driver calls of the container fail from now on", "err", err)
		log.close()
		w := event.NewWriter(f.Config.RunDir, f.Config.ID, f.Config.Nonce)
		w.Write(event.Event{Kind: event.Warning, Text: "the guard was killed, and nobody can go on in its place: " + err.Error()})
		w.Close()
		return err
	}
	return serve(g, sockets, f.Config, log, nil)
}

// rise is takeOver for a guard that was killed; before is why that cannot be.
func rise(f *guard.Fallen, before error, log *slog.Logger) (g *guard.Guard, sockets guard.Sockets, err error) {
	defer caught(&err)
	if before != nil {
		return nil, sockets, before
	}
	if err := awaitRescuer(f, log); err != nil {
		return nil, sockets, err
	}
	var conn *os.File
	if sim := f.Process.Sim; sim > 0 {
		if conn, err = handover.Copy(sim, "driver"); err != nil {
			return nil, sockets, err
		}
		defer conn.Close()
	}
	d, err := driver.Revive(f.Config, conn, f.SimFiles())
	if err != nil {
		return nil, sockets, err
	}
	if g, sockets, err = guard.Rise(f, d, log); err != nil {
		return nil, sockets, err
	}
	g.Arm(process.Start)
	return g, sockets, dropPrivileges()
}

// rescueTime is how long the rescuer has to let run what was paused.
const rescueTime = 5 * time.Second

// awaitRescuer waits until what the other guard had paused runs again: whoever pauses next begins with an empty list.
func awaitRescuer(f *guard.Fallen, log *slog.Logger) error {
	path := gpusched.LeftoversFile(f.Config.Socket)
	for until := time.Now().Add(rescueTime); time.Now().Before(until); time.Sleep(time.Millisecond) {
		if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
			return nil
		}
	}
	if _, err := gpusched.ResumeLeftovers(path, driver.Open, log); err != nil {
		return fmt.Errorf("resume what was paused: %w", err)
	}
	return nil
}
