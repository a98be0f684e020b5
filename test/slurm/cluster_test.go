// SPDX-License-Identifier: Apache-2.0

//go:build integration

// Package slurm starts jobs on a real slurmctld and slurmd, of Debian's packages, with slurm/cgpu_spank.so in their plugin stack. Run it by
// `make integration`.
package slurm

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/testenv"
	"github.com/opencgpu/cgpu/test/node"
)

var lab *node.Node

func TestMain(m *testing.M) { node.Main(m, &lab) }

// patience is for what always comes, however busy the machine is.
const patience = time.Minute

// cluster is a controller and a node of Slurm's on this machine, with munge, all in one folder.
type cluster struct {
	dir, conf, stack, policy string
}

// start makes a cluster, and ends it with the test.
func start(t *testing.T) *cluster {
	t.Helper()
	for _, program := range []string{"munged", "slurmctld", "slurmd", "srun", "cc"} {
		testenv.NeedsProgram(t, program)
	}
	if _, err := os.Stat("/usr/include/slurm/spank.h"); err != nil {
		testenv.Lacks(t, "no headers of Slurm's: %v", err)
	}
	// Not t.TempDir: jobs of other users pass through it.
	dir, err := os.MkdirTemp("", "cgpu-slurm")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	c := &cluster{dir: dir, conf: filepath.Join(dir, "slurm.conf"), stack: filepath.Join(dir, "plugstack.conf"),
		policy: filepath.Join(dir, "slurm.toml")}
	must(t, os.Chmod(dir, 0o755))
	must(t, os.Mkdir(filepath.Join(dir, "out"), 0o755))
	must(t, os.Chmod(filepath.Join(dir, "out"), 0o777))
	if out, err := exec.Command("make", "-C", "../../slurm", "OUT="+dir).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	probe, err := os.ReadFile(filepath.Join(lab.Bin, "cgpu-probe"))
	must(t, err)
	must(t, os.WriteFile(c.probe(), probe, 0o755))
	c.configure(t)
	c.plugin(t, "required", filepath.Join(lab.Bin, "cgpu"))
	c.limits(t, "")
	c.daemon(t, "munged", "--foreground", "--force", "--key-file="+c.file("munge.key"), "--socket="+c.file("munge.sock"),
		"--pid-file="+c.file("munge.pid"),
		"--log-file="+c.file("munge.log"), "--seed-file="+c.file("munge.seed"), "--num-threads=2")
	c.wait(t, "munge has no socket", func() bool { _, err := os.Stat(c.file("munge.sock")); return err == nil })
	c.daemon(t, "slurmctld", "-D", "-c", "-f", c.conf)
	c.daemon(t, "slurmd", "-D", "-c", "-f", c.conf, "-N", "lab")
	t.Cleanup(func() { // slurmstepd outlives slurmd, and a step its srun
		for _, u := range []*user{ann, bob} {
			c.as(nil, nil, "scancel", "--user="+u.name)
		}
		for end := time.Now().Add(patience); strings.TrimSpace(c.as(nil, nil, "squeue", "-h").Stdout) != "" && time.Now().Before(end); {
			time.Sleep(100 * time.Millisecond)
		}
	})
	c.wait(t, "the node is not idle", func() bool { return strings.TrimSpace(c.as(nil, nil, "sinfo", "-h", "-o", "%t").Stdout) == "idle" })
	return c
}

func (c *cluster) file(name string) string { return filepath.Join(c.dir, name) }
func (c *cluster) probe() string           { return c.file("probe") }

// configure writes slurm.conf and what goes with it. The GPUs of gres.conf are nodes of /dev/null: Slurm wants devices.
func (c *cluster) configure(t *testing.T) {
	t.Helper()
	host, err := os.Hostname()
	must(t, err)
	host, _, _ = strings.Cut(host, ".")
	for _, gpu := range []string{"gpu0", "gpu1"} {
		must(t, syscall.Mknod(c.file(gpu), syscall.S_IFCHR|0o666, 1<<8|3))
	}
	key := make([]byte, 1024)
	for i := range key {
		key[i] = byte(i * 7)
	}
	must(t, os.WriteFile(c.file("munge.key"), key, 0o600))
	must(t, os.WriteFile(c.file("gres.conf"), []byte("NodeName=lab Name=gpu File="+c.dir+"/gpu[0-1]\nNodeName=lab Name=shard Count=16\n"),
		0o644))
	ports := ports(t, 2)
	must(t, os.WriteFile(c.conf, fmt.Appendf(nil, `ClusterName=lab
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=%d
SlurmdPort=%d
AuthType=auth/munge
AuthInfo=socket=%[3]s/munge.sock
SlurmUser=root
StateSaveLocation=%[3]s/state
SlurmdSpoolDir=%[3]s/spool
SlurmctldPidFile=%[3]s/slurmctld.pid
SlurmdPidFile=%[3]s/slurmd.pid
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu,shard
PlugStackConfig=%[4]s
ReturnToService=2
KillWait=2
NodeName=lab NodeHostname=%[5]s NodeAddr=127.0.0.1 CPUs=%[6]d Gres=gpu:2,shard:16
PartitionName=main Nodes=lab Default=YES OverSubscribe=FORCE:64
`, ports[0], ports[1], c.dir, c.stack, host, runtime.NumCPU()), 0o644))
	must(t, os.Mkdir(c.file("state"), 0o755))
	must(t, os.Mkdir(c.file("spool"), 0o755))
}

// ports are some that nobody has at the moment.
func ports(t *testing.T, n int) (free []int) {
	t.Helper()
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		must(t, err)
		defer l.Close() // not before the next one is chosen
		free = append(free, l.Addr().(*net.TCPAddr).Port)
	}
	return free
}

// plugin writes plugstack.conf, which each srun and each step reads.
func (c *cluster) plugin(t *testing.T, how, cgpu string) {
	t.Helper()
	must(t, os.WriteFile(c.stack, []byte(how+" "+c.file("cgpu_spank.so")+" cgpu="+cgpu+" policy="+c.policy+
		" CGPU_RUN_DIR="+lab.RunDir+" CGPU_CONFIG="+os.Getenv("CGPU_CONFIG")+"\n"), 0o644))
}

// limits writes slurm.toml.
func (c *cluster) limits(t *testing.T, text string) {
	t.Helper()
	must(t, os.WriteFile(c.policy, []byte(text), 0o644))
}

// daemon starts a program in the foreground, and ends it with the test.
func (c *cluster) daemon(t *testing.T, args ...string) {
	t.Helper()
	log, err := os.Create(c.file(args[0] + ".log"))
	must(t, err)
	defer log.Close()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	must(t, cmd.Start())
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-done:
		case <-time.After(patience):
			_ = cmd.Process.Kill()
			t.Errorf("%s did not end", args[0])
		}
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("%s:\n%s", args[0], text[max(0, len(text)-6000):])
		}
	})
}

func (c *cluster) wait(t *testing.T, complaint string, done func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !done(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(complaint)
		}
	}
}

// user is somebody whom every Debian knows.
type user struct{ name, uid, gid string }

var (
	ann = &user{"nobody", "65534", "65534"}
	bob = &user{"daemon", "1", "1"}
)

// as runs a command as a user, or as root, with these variables and nothing of the lab's.
func (c *cluster) as(u *user, env []string, args ...string) node.Result {
	words := []string{"env", "-i", "-C", "/tmp", "PATH=" + os.Getenv("PATH"), "SLURM_CONF=" + c.conf}
	if u != nil {
		words = append([]string{"setpriv", "--reuid=" + u.uid, "--regid=" + u.gid, "--clear-groups"}, words...)
	}
	return lab.Run(nil, append(append(words, env...), args...)...)
}

// srun is a step of ann's.
func (c *cluster) srun(args ...string) node.Result {
	return c.as(ann, nil, append([]string{"srun"}, args...)...)
}

func records(t *testing.T) []ledger.Record {
	t.Helper()
	list, err := ledger.Open(lab.RunDir).List()
	must(t, err)
	return list
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
