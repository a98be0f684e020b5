// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/client-go/kubernetes/fake"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// socketAt makes a socket of an age; nobody listens at it but where it is to be alive.
func socketAt(t *testing.T, path string, age time.Duration, alive bool) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	if alive {
		t.Cleanup(func() { l.Close() })
	} else {
		l.Close()
	}
	made := time.Now().Add(-age)
	if err := os.Chtimes(path, made, made); err != nil {
		t.Fatal(err)
	}
}

// TestDeadSockets: what killed agents left goes, and nothing else of the folders, one of which all plugins of the node share.
func TestDeadSockets(t *testing.T) {
	o := options(t, fake.NewClientset())
	dir := filepath.Join(o.PluginDir, DriverName)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	stays := map[string]bool{}
	put := func(path string, age time.Duration, alive, stay bool) {
		socketAt(t, path, age, alive)
		stays[path] = stay
	}
	put(o.RegistryDir+"/gpu.cgpu.io-killed-reg.sock", time.Hour, false, false)
	put(o.RegistryDir+"/gpu.cgpu.io-reg.sock", time.Hour, false, false)
	put(dir+"/dra-killed.sock", time.Hour, false, false)
	put(dir+"/dra.sock", time.Hour, false, false)
	put(o.RegistryDir+"/gpu.cgpu.io-alive-reg.sock", time.Hour, true, true)
	put(dir+"/dra-alive.sock", time.Hour, true, true)
	put(dir+"/dra-new.sock", 0, false, true)
	put(o.RegistryDir+"/gpu.nvidia.com-killed-reg.sock", time.Hour, false, true)
	put(o.RegistryDir+"/gpu.cgpu.io.example-reg.sock", time.Hour, false, true)
	put(dir+"/other.sock", time.Hour, false, true)
	for _, path := range []string{o.RegistryDir + "/gpu.cgpu.io-file-reg.sock", dir + "/serialize.lock"} {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		stays[path] = true
	}
	link := dir + "/dra-link.sock"
	if err := os.Symlink(o.RegistryDir+"/gpu.nvidia.com-killed-reg.sock", link); err != nil {
		t.Fatal(err)
	}
	stays[link] = true
	d, err := Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Stop()
	// Without a pod's UID this agent's own sockets have the plain names, and listen now.
	own := []string{o.RegistryDir + "/gpu.cgpu.io-reg.sock", dir + "/dra.sock"}
	for _, path := range slices.Sorted(maps.Keys(stays)) {
		if _, err := os.Lstat(path); (err == nil) != (stays[path] || slices.Contains(own, path)) {
			t.Errorf("%s: stays %v: want %v", filepath.Base(path), err == nil, stays[path])
		}
	}
}

// TestSideBySide: while a DaemonSet is updated, the next agent starts beside the last, and that one's end is not its own.
func TestSideBySide(t *testing.T) {
	o := options(t, fake.NewClientset())
	start := func(uid string) *Driver {
		o.PodUID = uid
		d, err := Start(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	answers := func(uid string) error {
		conn, err := grpc.NewClient("unix:"+filepath.Join(o.RegistryDir, "gpu.cgpu.io-"+uid+"-reg.sock"),
			grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_, err = registration.NewRegistrationClient(conn).GetInfo(t.Context(), &registration.InfoRequest{})
		return err
	}
	last := start("last")
	// As old as that of an agent that has run for a day.
	for _, pattern := range []string{o.RegistryDir + "/*", o.PluginDir + "/*/*.sock"} {
		sockets, _ := filepath.Glob(pattern)
		for _, path := range sockets {
			if err := os.Chtimes(path, time.Time{}, time.Now().Add(-24*time.Hour)); err != nil {
				t.Fatal(err)
			}
		}
	}
	next := start("next")
	defer next.Stop()
	for _, uid := range []string{"last", "next"} {
		if err := answers(uid); err != nil {
			t.Errorf("%s: %v", uid, err)
		}
	}
	last.Stop()
	if err := answers("next"); err != nil {
		t.Errorf("after the end of the last: %v", err)
	}
	if left, _ := filepath.Glob(o.RegistryDir + "/*"); len(left) != 1 {
		t.Errorf("%v: want one socket", left)
	}
}
