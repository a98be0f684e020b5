// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"
)

// control commands a control daemon by its own program. It is used in the gate's turn, when no client is on its way.
type control struct {
	program  string
	env      []string
	patience time.Duration
	percent  int // what the next client gets, of the server that runs and of one that starts; 0: not known
}

// command returns what the program printed.
func (d *control) command(line string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), d.patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, d.program)
	cmd.Env, cmd.Stdin = d.env, strings.NewReader(line+"\n")
	cmd.WaitDelay = time.Second // what it may have started has the pipe too
	var out bounded
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	if ctx.Err() != nil {
		err = fmt.Errorf("no answer in %v", d.patience)
	}
	if err != nil {
		return "", fmt.Errorf("%s: %w %.200q", line, err, out.said.String())
	}
	return out.said.String(), nil
}

// maxSaid is more than the program prints of all clients.
const maxSaid = 64 << 10

// bounded is what a program prints, which ends by SIGPIPE when that is too much.
type bounded struct{ said bytes.Buffer }

func (b *bounded) Write(p []byte) (int, error) {
	if b.said.Len()+len(p) > maxSaid {
		return 0, fmt.Errorf("it says more than %d bytes", maxSaid)
	}
	return b.said.Write(p)
}

// servers are the daemon's, by their pids.
func (d *control) servers() ([]string, error) {
	out, err := d.command("get_server_list")
	var pids []string
	for _, word := range strings.Fields(out) {
		if _, err := strconv.ParseUint(word, 10, 31); err == nil {
			pids = append(pids, word)
		}
	}
	return pids, err
}

// setPercent has the next client get a part of the multiprocessors: its context takes what is set when it is made, whatever the client's
// environment says, which can only lower it.
func (d *control) setPercent(percent int) error {
	if percent == d.percent {
		return nil
	}
	d.percent = 0
	if _, err := d.command(fmt.Sprintf("set_default_active_thread_percentage %d", percent)); err != nil {
		return err
	}
	pids, err := d.servers()
	if err != nil {
		return err
	}
	for _, pid := range pids {
		out, err := d.command(fmt.Sprintf("set_active_thread_percentage %s %d", pid, percent))
		if err != nil {
			return err
		}
		if got, err := strconv.ParseFloat(strings.TrimSpace(out), 64); err != nil || got != float64(percent) {
			return fmt.Errorf("set_active_thread_percentage %s %d: the daemon says %.200q", pid, percent, out)
		}
	}
	d.percent = percent
	return nil
}

// terminate ends the work of clients, of those processes that are some.
func (d *control) terminate(pids []int) (failed error) {
	out, err := d.command("ps")
	if err != nil {
		return err
	}
	for line := range strings.Lines(out) {
		word := strings.Fields(line) // PID ID SERVER DEVICE NAMESPACE COMMAND
		if len(word) < 3 {
			continue
		}
		pid, err := strconv.Atoi(word[0])
		if err != nil || !slices.Contains(pids, pid) {
			continue
		}
		line := fmt.Sprintf("terminate_client %s %d", word[2], pid)
		switch said, err := d.command(line); {
		case err != nil:
			return err
		case strings.TrimSpace(said) != "0":
			failed = errors.Join(failed, fmt.Errorf("%s: the daemon says %.200q", line, said))
		}
	}
	return failed
}

// ask asks the server, by the daemon, whether it serves. One that waits for a client does not answer; one in FAULT takes nobody until all
// that computed have gone, whose contexts are lost.
func (d *control) ask() error {
	pids, err := d.servers()
	for _, pid := range pids {
		var status string
		if status, err = d.command("get_server_status " + pid); err != nil {
			break
		}
		if strings.TrimSpace(status) == "FAULT" {
			return errFault
		}
	}
	if err != nil {
		return fmt.Errorf("the MPS server does not answer (%w)", err)
	}
	return nil
}

var errFault = errors.New("the MPS server takes no more clients (FAULT): a program of the domain has made an error on the GPU")

// watch asks it again and again, with alone in a turn of its own, and returns why it does not serve when it has not for two times.
func (d *control) watch(ctx context.Context, every time.Duration, alone func(func() error) error) error {
	for twice := false; ; {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(every):
		}
		err := alone(d.ask)
		if err != nil && twice {
			return err
		}
		twice = err != nil
	}
}
