// SPDX-License-Identifier: Apache-2.0

package mpstest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
)

// Program stands for nvidia-cuda-mps-control: with -f it is the daemon, in the folder that CUDA_MPS_PIPE_DIRECTORY names, until it is told
// to quit; without arguments it commands the daemon there what is on standard input.
func Program(args []string, d *Daemon) error {
	socket := filepath.Join(os.Getenv("CUDA_MPS_PIPE_DIRECTORY"), "control")
	switch {
	case len(args) == 0:
		text, err := io.ReadAll(io.LimitReader(os.Stdin, 1024))
		if err != nil {
			return err
		}
		for _, line := range strings.FieldsFunc(string(text), func(r rune) bool { return r == '\n' }) {
			said, err := Command(socket, line)
			if err != nil {
				return err
			}
			fmt.Print(said)
		}
		return nil
	case args[0] != "-f" || len(args) > 1 && args[1] != "-multiuser-server":
		return fmt.Errorf("%q: want -f, or nothing", args)
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		return err
	}
	d.Quit = func() { _ = l.Close() }
	d.Serve(l)
	return nil
}

// Command commands a daemon, as the driver's program does, and returns what it says.
func Command(socket, text string) (string, error) {
	c, err := Dial(socket, AsCommand)
	if err != nil {
		return "", err
	}
	defer c.Close()
	line := text + "\n\x00"
	for _, packet := range [][]byte{binary.LittleEndian.AppendUint64(nil, uint64(len(line))), []byte(line), make([]byte, 8)} {
		if _, err := c.Write(packet); err != nil {
			return "", err
		}
	}
	said := make([]byte, 4096)
	n, err := c.Read(said)
	if err != nil {
		return "", err
	}
	done, err := word(c)
	if err == nil && done != 1 {
		err = errors.New("the daemon did not do it")
	}
	return strings.TrimRight(string(said[:n]), "\x00"), err
}
