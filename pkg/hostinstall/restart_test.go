// SPDX-License-Identifier: Apache-2.0

package hostinstall

import (
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
)

// TestOthersRestart: one that had begun before the change, so that the engine has not read it, does not count.
func TestOthersRestart(t *testing.T) {
	for _, at := range []string{"pending", "configured"} {
		root := node(t)
		systemd(t, root)
		j := job{Root: root, Source: image(t, "one"), Engine: "auto", Restarts: true, Systemd: true, At: at, Meanwhile: "restart"}
		out := j.must(t)
		if n := restarts(t, root); n != 1 {
			t.Errorf("at step %q: %d restarts, want 1\n%s", at, n, out)
		}
	}
	root := node(t)
	j := job{Root: root, Source: image(t, "one"), Engine: "auto", At: "pending", Meanwhile: "restart"}
	j.waits(t, "waits until /run/containerd/containerd.sock is a new one", func() { restart(root) })
}

// TestOthersChange: what another installer changes while this one sees the restart is read by one more.
func TestOthersChange(t *testing.T) {
	root := node(t)
	systemd(t, root)
	j := job{Root: root, Source: image(t, "one"), Engine: "auto", Restarts: true, Systemd: true, At: "restarted", Meanwhile: "change"}
	out := j.must(t)
	if n := restarts(t, root); n != 2 {
		t.Errorf("%d restarts, want 2\n%s", n, out)
	}
	if _, err := os.Stat(root + pendingFile()); err == nil {
		t.Error("a restart is pending")
	}
}

// picky gives a node a systemctl whose containerd comes back with some configurations only: those for which a shell's test is true.
func picky(t *testing.T, root, test string) {
	t.Helper()
	put(t, root+"/usr/bin/systemctl", "#!/bin/sh\necho \"$@\" >>/systemctl.log\n"+
		"ours() { /bin/busybox grep -q cgpu-runtime /etc/containerd/config.toml; }\n"+
		test+" || { echo 'Job for containerd.service failed' >&2; exit 1; }\n: >/run/containerd/new\n"+
		"/bin/busybox mv /run/containerd/new /run/containerd/containerd.sock\n")
}

// TestDoesNotComeBack: an engine that does not start with what changed gets back what it had, and is stopped once for it, not again and
// again.
func TestDoesNotComeBack(t *testing.T) {
	const back = "its files are as they were, and it "
	for name, c := range map[string]struct {
		test      string
		uninstall bool
		says      string
		restarts  int
		ours      bool // the runtime is in the configuration at the end
	}{
		"install":      {"! ours", false, "failed; see journalctl -u containerd; " + back + "runs again", 2, false},
		"uninstall":    {"ours", true, back + "runs again", 2, true},
		"with nothing": {"false", false, back + "does not start with them either", 2, false},
		"others' configuration": {"echo '# theirs' >>/etc/containerd/config.toml; false", false,
			"config.toml: others have changed it since", 1, true},
	} {
		t.Run(name, func(t *testing.T) {
			root := node(t)
			systemd(t, root)
			j := job{Root: root, Source: image(t, "one"), Engine: "auto", Restarts: true, Systemd: true}
			if c.uninstall {
				j.must(t)
				_ = os.Remove(root + "/systemctl.log")
			}
			config, pods := root+"/etc/containerd/config.toml", root+"/etc/cgpu/cgpu.toml"
			before := read(t, config) + read(t, pods)
			picky(t, root, c.test)
			j.Uninstall = c.uninstall
			process, said := j.says(t, "delete this pod to have it tried again")
			if !strings.Contains(said.String(), c.says) {
				t.Errorf("it says\n%s\nwant %q", said.String(), c.says)
			}
			if n := restarts(t, root); n != c.restarts {
				t.Errorf("%d restarts, want %d", n, c.restarts)
			}
			if after := read(t, config) + read(t, pods); after != before && c.restarts > 1 {
				t.Errorf("the files are\n%s\nand were\n%s", after, before)
			}
			if ours := strings.Contains(read(t, config), "cgpu-runtime"); ours != c.ours {
				t.Errorf("the runtime is there: %v", ours)
			}
			sound(t, root)
			if err := process.Process.Signal(syscall.SIGTERM); err != nil {
				t.Error(err)
			}
			if err := process.Wait(); err == nil {
				t.Error("it ends as if all were well")
			}
		})
	}
}

// TestNoSystemd: where systemd cannot be asked the engine still runs: nothing is put back, and it is tried again.
func TestNoSystemd(t *testing.T) {
	root := node(t)
	systemd(t, root)
	picky(t, root, "false")
	socket := root + sockets["containerd"]
	_ = os.Remove(socket)
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	j := job{Root: root, Source: image(t, "one"), Engine: "auto", Restarts: true, Systemd: true}
	if out, _, err := j.do(t); err == nil || !strings.Contains(out, "--restart: systemctl restart containerd: ") {
		t.Errorf("%v\n%s", err, out)
	}
	if !strings.Contains(read(t, root+"/etc/containerd/config.toml"), "cgpu-runtime") {
		t.Error("the configuration was put back")
	}
	systemd(t, root)
	j.must(t)
}
