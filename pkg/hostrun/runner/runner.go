// SPDX-License-Identifier: Apache-2.0

// Package runner reserves a slice of a GPU for a command of the host and becomes the command.
package runner

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/opencgpu/cgpu/pkg/admit"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/health"
	"github.com/opencgpu/cgpu/pkg/hostrun"
	"github.com/opencgpu/cgpu/pkg/launch"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/spec"
)

// GuardName is the command of cgpu's that it starts itself as, to start the guard (launch.StartApart).
const GuardName = "run-guard"

// Command is what runs on a slice.
type Command struct {
	Quota   *quota.Quota
	Paused  bool                  // from its beginning
	Name    string                // for cgpu smi
	Guard   []string              // the program that is to become the guard, and its arguments
	Refused func(err error) error // tells a refusal in the words that were used
	Run     hostrun.Run           // without what is reserved for it
}

// Become reserves a slice and becomes the command. The steps are those of create in cmd/cgpu-runtime/main.go; then, instead of runc,
// package hostrun.
func Become(cmd Command) error {
	home, err := hostrun.StepOut()
	if err != nil {
		return err
	}
	runDir := cmd.Run.RunDir
	session := launch.Session{RunDir: runDir}
	undo := session.Undo
	defer func() { _ = undo() }()
	if session.Guard, err = launch.StartApart(runDir, cmd.Guard); err != nil {
		return err
	}
	table, err := node.Load(runDir)
	if err != nil {
		return err
	}
	if err := unheld(table.Config); err != nil {
		return err
	}
	if err := hostrun.CheckFiles(table.Nodes); err != nil {
		return err
	}
	plan, err := reservePlan(&session, cmd, table, home, Task{})
	if err != nil {
		return err
	}
	if err := session.Ready(); err != nil {
		return err
	}
	health.Warn(runDir, table, session.Record)
	// From here on no lock of the node's is taken.
	if err := home.Return(); err != nil {
		return err
	}
	plan.RunDir = runDir
	cmd.Run.Plan, cmd.Run.Cgroups = plan, home.Cgroups(session.Record.Nonce)
	err = hostrun.Exec(cmd.Run)
	// Part of it may be done, and this process another user's. The guard gives all back when it sees us end.
	undo = func() error { return nil }
	return err
}

// unheld says why this node holds no process without a container as it holds containers.
func unheld(c device.Config) error {
	if setting := c.Unguarded(); setting != "" {
		key, _, _ := strings.Cut(setting, " ")
		return fmt.Errorf(`run: %s in cgpu.toml: a process without a container is held by a guard or not at all; set %s = "guard"`, setting, key)
	}
	if c.DriverLimits {
		return errors.New(`run: limits = "both" in cgpu.toml: cgpu-hook has the driver limit containers only; set limits = "guard"`)
	}
	return nil
}

// Task is a process of another program's (Slurm's) that waits, with a mount namespace of its own, to become the command.
type Task struct {
	PID     int
	Owners  []string // as in ledger.Record
	Budgets []ledger.Budget
}

// Prepare is Become for a task: it reserves a slice and does what can be done from outside. tell says the rest to the task, and table is
// the node's. The guard gives all back when it sees the task end, or when this fails.
func Prepare(cmd Command, task Task, tell func(fence hostrun.Fence, table *device.Table) error) error {
	home, err := hostrun.HomeOf(task.PID)
	if err != nil {
		return err
	}
	session := launch.Session{RunDir: cmd.Run.RunDir}
	undo := session.Undo
	defer func() { _ = undo() }()
	if session.Guard, err = launch.Start(session.RunDir); err != nil {
		return err
	}
	table, err := node.Load(session.RunDir)
	if err != nil {
		return err
	}
	if err := unheld(table.Config); err != nil {
		return err
	}
	plan, err := reservePlan(&session, cmd, table, home, task)
	if err != nil {
		return err
	}
	if err := session.Ready(); err != nil {
		return err
	}
	health.Warn(session.RunDir, table, session.Record)
	plan.RunDir = session.RunDir
	cmd.Run.Plan, cmd.Run.Cgroups = plan, home.Cgroups(session.Record.Nonce)
	fence, err := hostrun.Prepare(task.PID, cmd.Run)
	if err != nil {
		return err
	}
	if err := tell(fence, table); err != nil {
		return err
	}
	undo = func() error { return nil }
	return nil
}

// reservePlan reserves the slice and has the guard know of it. A task's launcher is the task; without one it is this process.
func reservePlan(session *launch.Session, cmd Command, table *device.Table, home hostrun.Home, task Task) (plan spec.Plan, err error) {
	doc, err := spec.Decode([]byte("{}"))
	if err != nil {
		return plan, err
	}
	if err := mayJoin(cmd, table); err != nil {
		return plan, cmd.Refused(err)
	}
	ask := &admit.Ask{Doc: doc, Quota: cmd.Quota}
	session.Table = table
	if err := session.Ask(ask, ledger.Record{Bundle: "/", Owners: task.Owners, LauncherPID: task.PID}); err != nil {
		return plan, cmd.Refused(err)
	}
	session.Request.Record.Name, session.Request.Refuse = cmd.Name, ledger.Within(task.Budgets)
	session.Request.Record.Paused = cmd.Paused
	if cmd.Quota.DomainServer {
		session.Request.Refuse = ledger.SoleServer(cmd.Quota.Domain)
	}
	if err := reserve(session, time.Now().Add(reservePatience)); err != nil {
		return plan, cmd.Refused(ask.Refused(err))
	}
	cgroups := home.Cgroups(session.Record.Nonce)
	sweepRuns(session.RunDir, cgroups)
	if err := session.Tell(cgroups); err != nil {
		return plan, err
	}
	return ask.Plan(session.Record, table)
}

// mayJoin refuses a trust domain to a user who comes through sudo and is not among the domain's.
func mayJoin(cmd Command, table *device.Table) error {
	q, user := cmd.Quota, cmd.Run.User
	if q.Domain == "" || !throughSudo() {
		return nil
	}
	if d := table.Config.Domain(q.Domain); d == nil || d.LetsUser(user.Name, strconv.Itoa(user.UID)) {
		return nil // of one that there is not its guard tells
	}
	return q.RefuseDomain(fmt.Sprintf("user %s is none of its users", cmp.Or(user.Name, strconv.Itoa(user.UID))),
		"have the administrator add the name to users of that domain in cgpu.toml, or leave the domain out")
}

// reservePatience is how long a refused run waits for others that have ended and that the driver is still cleaning up after.
const reservePatience = 2 * time.Second

// reserve is Session.Reserve for one who may come right after another run: "cgpu run … a; cgpu run … b" must not fail because
// the first one's guard takes some milliseconds to give its slice back.
func reserve(session *launch.Session, deadline time.Time) error {
	for {
		err := session.Reserve()
		_, refused := errors.AsType[*ledger.Refusal](err)
		if !refused || time.Now().After(deadline) {
			return err
		}
		records, listErr := ledger.Open(session.RunDir).List()
		if listErr != nil || !anyEnding(records) {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// anyEnding reports a container or run whose first process is gone and whose guard is not yet.
func anyEnding(records []ledger.Record) bool {
	for _, r := range records {
		start, err := ledger.ProcStart(r.InitPID)
		if r.InitPID != 0 && (err != nil || start != r.InitStart) && r.GuardLives() {
			return true
		}
	}
	return false
}

// sweepRuns removes the cgroups of runs whose guard was killed.
func sweepRuns(runDir string, cgroups []string) {
	// Asked after the cgroups were listed: who makes one has a record by then.
	list := sync.OnceValues(ledger.Open(runDir).List)
	hostrun.SweepCgroups(cgroups, func(nonce string) bool {
		records, err := list()
		return err != nil || slices.ContainsFunc(records, func(r ledger.Record) bool { return r.Nonce == nonce })
	})
}
