// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const (
	kubeletSocket = "kubelet.sock"
	// oldSocket is that of gpushare's own device plugin. Of two plugins that serve one resource the kubelet takes the one
	// that registered last, with the ids of the other still booked.
	oldSocket = "aliyungpushare.sock"

	// lookEvery is how often the sockets are looked at: a stat or two. Pods that come to a kubelet before the plugin does are
	// refused, and stay so.
	lookEvery = 200 * time.Millisecond
	// failedPause is before the next registration after one that the kubelet did not take, or may not be made.
	failedPause = time.Second
	// register is answered when the kubelet has dialled us; then it opens the stream.
	registerTimeout = 10 * time.Second
	streamTimeout   = 10 * time.Second
	// maxRequest of the kubelet: GetPreferredAllocation names all free devices, which are up to 4 MiB, and more of them.
	maxRequest = 16 << 20
)

// socket is the name of a resource's socket in the kubelet's folder.
func socket(resource string) string { return "cgpu-" + filepath.Base(resource) + ".sock" }

// keep serves the resource until ctx ends. The kubelet, when it starts, removes all sockets of its folder and makes its own
// anew; so both are looked at, and each round listens and registers again. That is polled: a watch of a folder that may be
// removed with all in it has more cases than a stat five times a second.
func (s *server) keep(ctx context.Context) {
	for ctx.Err() == nil {
		err := s.round(ctx)
		if err != nil && ctx.Err() == nil {
			s.p.fault(s.resource, err)
		}
		pause := failedPause
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, errRestarted) {
			pause = lookEvery
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

var errRestarted = errors.New("the kubelet was restarted")

// round serves until the kubelet is another, or the stream to it ended.
func (s *server) round(ctx context.Context) error {
	folder := s.p.o.KubeletDir
	kubelet, err := identify(filepath.Join(folder, kubeletSocket))
	if err != nil {
		return fmt.Errorf("the kubelet is not there: %w", err)
	}
	if s.resource == ResourceMemory && answers(filepath.Join(folder, oldSocket)) {
		return fmt.Errorf("%s answers: gpushare's own device plugin serves this node: remove its DaemonSet, or its label gpushare=true "+
			"from the node", filepath.Join(folder, oldSocket))
	}
	path := filepath.Join(folder, socket(s.resource))
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		return err
	}
	ours, err := identify(path)
	if err != nil {
		listener.Close()
		return err
	}
	s.streams.reset()
	g := grpc.NewServer(grpc.MaxRecvMsgSize(maxRequest))
	pluginapi.RegisterDevicePluginServer(g, s)
	var ended sync.WaitGroup
	ended.Go(func() { _ = g.Serve(listener) }) // ends by Stop; the socket goes with the listener
	defer ended.Wait()
	defer g.Stop()
	if err := s.p.meet(ctx); err != nil {
		return err
	}
	if err := s.register(ctx, filepath.Join(folder, kubeletSocket)); err != nil {
		return fmt.Errorf("the kubelet does not take the registration: %w", err)
	}
	s.p.log.Info("registered with the kubelet", "resource", s.p.o.Names.Outside(s.resource))
	began := time.Now()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(lookEvery):
		}
		if now, err := identify(filepath.Join(folder, kubeletSocket)); err != nil || now != kubelet {
			return errRestarted
		}
		if now, err := identify(path); err != nil || now != ours {
			return fmt.Errorf("%s was removed", path)
		}
		if s.streams.lost(began) {
			return errors.New("the kubelet ended the stream of devices")
		}
	}
}

// register tells the kubelet where the resource is served.
func (s *server) register(ctx context.Context, kubelet string) error {
	ctx, cancel := context.WithTimeout(ctx, registerTimeout)
	defer cancel()
	conn, err := dial(kubelet)
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = pluginapi.NewRegistrationClient(conn).Register(ctx, &pluginapi.RegisterRequest{
		Version:      pluginapi.Version,
		Endpoint:     socket(s.resource),
		ResourceName: s.p.o.Names.Outside(s.resource),
		Options:      &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: true},
	})
	return err
}

// dial connects to a socket of the kubelet's; it does not wait.
func dial(path string, options ...grpc.DialOption) (*grpc.ClientConn, error) {
	options = append(options, grpc.WithTransportCredentials(insecure.NewCredentials()),
		// unix:// would take % and # of a path for an URL's.
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}))
	return grpc.NewClient("passthrough:///kubelet", options...)
}

// identity tells a file from its successor of the same name, which may well have the same inode number.
type identity struct {
	dev, inode uint64
	changed    syscall.Timespec
}

func identify(path string) (identity, error) {
	var st syscall.Stat_t
	if err := syscall.Stat(path, &st); err != nil {
		return identity{}, fmt.Errorf("%s: %w", path, err)
	}
	return identity{st.Dev, st.Ino, st.Ctim}, nil
}

// answers reports that a process listens.
func answers(path string) bool {
	conn, err := net.DialTimeout("unix", path, time.Second)
	if err != nil {
		return false
	}
	conn.Close()
	return true
}

// streams are the kubelet's streams of devices. It has one, and opens the next, when it is registered anew, before it ends
// the old one.
type streams struct {
	mu     sync.Mutex
	number int
	ended  time.Time
}

func (s *streams) open() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.number++
}

func (s *streams) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.number, s.ended = s.number-1, time.Now()
}

// reset is called between two servers, when no stream is left.
func (s *streams) reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = time.Time{}
}

// lost reports that there is no stream, though there should be: it ended, or it did not come.
func (s *streams) lost(registered time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.number > 0 {
		return false
	}
	return !s.ended.IsZero() || time.Since(registered) > streamTimeout
}
