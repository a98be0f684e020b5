// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"runtime"
	"syscall"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/domain/server"
)

// mpsCommand is the domain's server: what its run has as its command.
func mpsCommand() *cli.Command {
	return &cli.Command{
		Name:      server.ServeName,
		Hidden:    true,
		ArgsUsage: "-- DAEMON ARGUMENT…",
		Flags:     []cli.Flag{&cli.StringFlag{Name: "members", Required: true, Usage: "`FOLDER` that members of the domain get"}},
		Action: func(c *cli.Context) error {
			if err := unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0); err != nil { // or the map of users could not be written
				return err
			}
			runtime.LockOSThread() // when this thread ends, the signal comes
			args := c.Args().Slice()
			daemon := exec.Command(args[0], args[1:]...)
			dir := c.String("members")
			daemon.Env = append(os.Environ(), "CUDA_MPS_PIPE_DIRECTORY="+dir, "CUDA_MPS_LOG_DIRECTORY="+dir)
			daemon.Stdout, daemon.Stderr = os.Stdout, os.Stderr
			// As root of a user namespace the daemon serves clients of all users, without any privilege outside.
			daemon.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Cloneflags: syscall.CLONE_NEWUSER,
				UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
				GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}}
			return daemon.Run()
		},
	}
}
