// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/testenv"
)

// words is memory as rmtrace.c writes it down.
func words(list ...uint32) string {
	var b []byte
	for _, w := range list {
		b = binary.LittleEndian.AppendUint32(b, w)
	}
	return hex.EncodeToString(b)
}

// TestMPSTrace: what goes from one process to another is found, and beside each call is what the guard's tables say of it.
func TestMPSTrace(t *testing.T) {
	testenv.NeedsProgram(t, "python3")
	folder := t.TempDir()
	write := func(at float64, program string, pid int, line string) {
		f, err := os.OpenFile(filepath.Join(folder, fmt.Sprintf("%s.%d", program, pid)), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := fmt.Fprintf(f, "%.6f %s[%d] %s\n", at, program, pid, line); err != nil {
			t.Fatal(err)
		}
	}
	rm := func(nr int, in, out, pin, pout string) string {
		return fmt.Sprintf("rm nr=%#x size=32 file=/dev/nvidiactl fd=5 rc=0 errno=0 us=3 in=%s out=%s pin=%s pout=%s", nr, in, out, pin, pout)
	}
	const server, client = "nvidia-cuda-mps-server", "mps"
	memory := words(make([]uint32, 16)...) + words(8<<20, 0)
	write(1.0, server, 10, rm(0x2b, "-", words(0xc1d00001, 0, 0xc1d00001, 0x41, 0, 0, 0, 0), "-", "-"))
	write(1.1, server, 10, rm(0x2b, "-", words(0xc1d00001, 2, 7, 0xa06c, 0, 0, 0, 0), words(0, 0, 3, 1, 0), "-"))
	write(1.2, server, 10, rm(0x2b, "-", words(0xc1d00001, 2, 8, 0x40, 0, 0, 0, 0), memory, memory))
	write(1.3, server, 10, rm(0x35, words(0xc1d00001, 7, 0, 1, 2, 0), words(0xc1d00001, 7, 0, 1, 2, 0), "-", "-"))
	write(1.4, client, 20, "mark context")
	write(1.5, client, 20, rm(0x2b, "-", words(0xc1d00002, 0, 0xc1d00002, 0x41, 0, 0, 0, 0), "-", "-"))
	write(1.6, client, 20, rm(0x34, "-", words(0xc1d00002, 5, 9, 0xc1d00001, 7, 0, 0), "-", "-"))
	write(1.7, client, 20, rm(0x2a, "-", words(0xc1d00002, 9, 0xa06c0105, 0, 0, 0, 8, 0x56), words(1, 1000), "-"))
	write(1.8, client, 20, "uvm nr=0x1b size=64 file=/dev/nvidia-uvm fd=6 rc=0 errno=0 us=3 in=- out="+words(0, 0, 0, 0, 5, 0xc1d00001,
		7, 0)+" pin=- pout=-")
	out, err := exec.Command("python3", "rmtrace.py", folder).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range []string{
		"makes KEPLER_CHANNEL_GROUP_A 0xa06c 0x7",
		"opens KEPLER_CHANNEL_GROUP_A 0xa06c to OS_SECURITY_TOKEN",
		"dups KEPLER_CHANNEL_GROUP_A 0xa06c of client 0xc1d00001 of server/10 into client 0xc1d00002 of mps/20 as 0x9",
		"NVA06C_CTRL_CMD_PREEMPT 0xa06c0105 [ControlPreempt] of KEPLER_CHANNEL_GROUP_A 0xa06c",
		"uvm REGISTER_CHANNEL: KEPLER_CHANNEL_GROUP_A 0xa06c of client 0xc1d00001 of server/10",
		"server/10           8.0",
		"mps/20         context            control NVA06C_CTRL_CMD_PREEMPT 0xa06c0105 [ControlPreempt]: status 0x56",
	} {
		if !strings.Contains(string(out), want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	if out, err = exec.Command("python3", "rmtrace.py", folder, "--answers").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range []string{"\nclass KEPLER_CHANNEL_GROUP_A 0xa06c [ClassTSG]: rc 0 errno 0 status 0x0\n",
		"\ncontrol NVA06C_CTRL_CMD_PREEMPT 0xa06c0105 [ControlPreempt]: rc 0 errno 0 status 0x56\n"} {
		if !strings.Contains("\n"+string(out), want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
}
