// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"syscall"

	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/rmclient"
)

// newScheduler makes what shares out GPU time.
func newScheduler(g *Guard) *gpusched.Scheduler {
	return gpusched.New(gpusched.Options{
		Config: g.cfg, Container: tenant{g}, Driver: g.driver, ABI: g.abi, Log: g.log, LogOnce: g.logOnce,
		Warn: func(text string) { g.events.Note(event.Event{Kind: event.Warning, Text: text}) },
	})
}

// Arm takes what needs root's powers, before they are dropped. startArbiter starts who decides about a GPU's time, unless somebody does.
func (g *Guard) Arm(startArbiter func(runDir, uuid string, config []byte) error) {
	g.gpuTime.StartArbiter = startArbiter
	g.gpuTime.Arm()
}

// tenant is the container as GPU time sees it.
type tenant struct{ guard *Guard }

func (t tenant) Groups(gpu int) []gpusched.Group { return t.guard.account.groupsOn(gpu) }
func (t tenant) Channels(gpu int, all bool) []gpusched.Channel {
	return t.guard.account.channelsOn(gpu, all)
}
func (t tenant) GoOn(channels []gpusched.Channel) []gpusched.Channel {
	return t.guard.account.mayRun(channels)
}
func (t tenant) Gone(ch gpusched.Channel)      { t.guard.account.dropGone(ch.Client, objectOf(ch)) }
func (t tenant) Guests() []int                 { return t.guard.guests.present() }
func (t tenant) Owners() map[int]bool          { return t.guard.account.clientPIDs() }
func (t tenant) RM() (*rmclient.Client, error) { return t.guard.guardClient() }
func (t tenant) UserPage(gpu int, ch gpusched.Channel) (*gpusched.UserPage, error) {
	return t.guard.openUserPage(gpu, ch)
}

func (t tenant) File(c gpusched.Client) (gpusched.File, bool) {
	of := c.(*client)
	target, ok := t.guard.fileOf(of)
	return clientFile{t.guard, of, target}, ok
}

// Handle and PID are what GPU time knows a client by.
func (c *client) Handle() uint32 { return c.handle }

// PID is the process that made the client.
func (c *client) PID() int { return c.tgid }

// clientFile is a client's file.
type clientFile struct {
	guard  *Guard
	client *client
	target Target
}

func (f clientFile) Hold(groups []gpusched.Group) (living []gpusched.Group, release func()) {
	release = f.client.lockCallsSoon()
	return f.guard.account.livingGroups(groups), release
}

func (f clientFile) Control(object, cmd uint32, params []byte) (uint32, syscall.Errno) {
	return f.guard.rmControl(f.target, f.client.handle, object, cmd, params)
}

func (f clientFile) Close() { f.target.Done() }
