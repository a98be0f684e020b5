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
type tenant struct{ g *Guard }

func (t tenant) Groups(gpu int) []gpusched.Group { return t.g.account.groupsOn(gpu) }
func (t tenant) Channels(gpu int, all bool) []gpusched.Channel {
	return t.g.account.channelsOn(gpu, all)
}
func (t tenant) GoOn(channels []gpusched.Channel) []gpusched.Channel {
	return t.g.account.mayRun(channels)
}
func (t tenant) Gone(ch gpusched.Channel)      { t.g.account.dropFreedChannel(ch) }
func (t tenant) Owners() map[int]bool          { return t.g.account.clientPIDs() }
func (t tenant) RM() (*rmclient.Client, error) { return t.g.guardClient() }
func (t tenant) UserPage(gpu int, ch gpusched.Channel) (*gpusched.UserPage, error) {
	return t.g.openUserPage(gpu, ch)
}

func (t tenant) File(c gpusched.Client) (gpusched.File, bool) {
	of := c.(*client)
	target, ok := t.g.fileOf(of)
	return clientFile{t.g, of, target}, ok
}

// Handle and PID are what GPU time knows a client by.
func (c *client) Handle() uint32 { return c.handle }

// PID is the process that made the client.
func (c *client) PID() int { return c.tgid }

// clientFile is a client's file.
type clientFile struct {
	g      *Guard
	client *client
	target Target
}

func (f clientFile) Hold(groups []gpusched.Group) (living []gpusched.Group, release func()) {
	release = f.client.lockCallsSoon()
	return f.g.account.livingGroups(groups), release
}

func (f clientFile) Control(object, cmd uint32, params []byte) (uint32, syscall.Errno) {
	return f.g.rmControl(f.target, f.client.handle, object, cmd, params)
}

func (f clientFile) Close() { f.target.Done() }
