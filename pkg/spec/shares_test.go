// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/opencgpu/cgpu/pkg/alloc"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// withHooks puts the hooks of shares into a recorded config.json, as containerd does for CDI devices.
func withHooks(t testing.TB, name, kind string, hooks ...specs.Hook) []byte {
	t.Helper()
	doc := decode(t, recorded(t, name))
	for _, h := range hooks {
		if err := addHook(doc, kind, h); err != nil {
			t.Fatal(err)
		}
	}
	return doc.Encode()
}

func shareHook(s alloc.Share) specs.Hook {
	return specs.Hook{Path: "/opt/cgpu/bin/cgpu-hook", Args: alloc.HookArgs(s)}
}

func TestTakeShares(t *testing.T) {
	share := func(id, uuid string) alloc.Share {
		return alloc.Share{ID: id, UUID: uuid, Slice: quota.Slice{Limit: quota.GiB, Share: quota.Share{Priority: quota.PriorityDefault}},
			Containers: 1}
	}
	other := specs.Hook{Path: "/bin/true", Args: []string{"true", alloc.HookCommand, alloc.AnnotationShares, "x"}}
	for _, kind := range []string{"createRuntime", "prestart", "createContainer", "poststop"} {
		raw := withHooks(t, "cri16-default", kind, shareHook(share("c/1", "GPU-a")), other, shareHook(share("c/2", "GPU-b")),
			specs.Hook{Path: "/usr/bin/cgpu-hook", Args: []string{"cgpu-hook", "release", "--id", "x", "--nonce", "y"}})
		doc := decode(t, raw)
		shares, taken, err := doc.TakeShares()
		if err != nil || taken != 2 || len(shares) != 2 || shares[0] != share("c/1", "GPU-a") || shares[1] != share("c/2", "GPU-b") {
			t.Fatalf("%s: %v, %d, %v", kind, shares, taken, err)
		}
		var got edited
		if err := json.Unmarshal(doc.Encode(), &got); err != nil {
			t.Fatal(err)
		}
		if hooks := got.Hooks[kind]; len(hooks) != 2 || hooks[0].Path != other.Path || hooks[1].Args[1] != "release" {
			t.Errorf("%s: left %+v", kind, hooks)
		}
	}
	// Without shares nothing changes, byte for byte.
	raw := withHooks(t, "cri16-default", "createRuntime", other)
	doc := decode(t, raw)
	if shares, taken, err := doc.TakeShares(); err != nil || taken != 0 || shares != nil || !bytes.Equal(doc.Encode(), raw) {
		t.Errorf("%v, %d, %v", shares, taken, err)
	}
}

// What is in our hooks and cannot be understood is refused, and none of them stays to run.
func TestTakeSharesRefuses(t *testing.T) {
	garbage := func(args ...string) specs.Hook {
		return specs.Hook{Path: "/usr/bin/cgpu-hook", Args: append([]string{"cgpu-hook", alloc.HookCommand, alloc.AnnotationShares}, args...)}
	}
	good := shareHook(alloc.Share{ID: "c/1", UUID: "GPU-a",
		Slice: quota.Slice{Limit: quota.GiB, Share: quota.Share{Priority: quota.PriorityDefault}}, Containers: 1})
	for name, bad := range map[string]specs.Hook{
		"none":       garbage(),
		"two":        garbage("id=c,memory=1048576", "id=d,memory=1048576"),
		"no share":   garbage("\x00\n{}"),
		"newer":      garbage("id=c,memory=1048576,shiny=1"),
		"absurd id":  garbage("id=" + strings.Repeat("c", 1<<20) + ",memory=1048576"),
		"no memory":  garbage("id=c,uuid=GPU-a"),
		"overflow":   garbage("id=c,memory=18446744073709551616"),
		"containers": garbage("id=c,memory=1048576,containers=1000000"),
	} {
		doc := decode(t, withHooks(t, "cri16-default", "createRuntime", good, bad))
		shares, taken, err := doc.TakeShares()
		if err == nil || shares != nil || taken != 2 || strings.Contains(err.Error(), "\n") || len(err.Error()) > 400 {
			t.Errorf("%s: %v, %d, %.500v", name, shares, taken, err)
		}
		if bytes.Contains(doc.Encode(), []byte(alloc.HookCommand)) {
			t.Errorf("%s: a hook stayed", name)
		}
	}
	for _, hooks := range []string{`5`, `{"createRuntime":5}`, `{"createRuntime":"x"}`} {
		doc := decode(t, []byte(fmt.Sprintf(`{"hooks":%s}`, hooks)))
		if _, _, err := doc.TakeShares(); err == nil {
			t.Errorf("%s was taken", hooks)
		}
	}
}

// FuzzTakeShares: no hook of ours is left that could be read as a share, and what is left is JSON.
func FuzzTakeShares(f *testing.F) {
	good := shareHook(alloc.Share{ID: "c/1", UUID: "GPU-a",
		Slice: quota.Slice{Limit: quota.GiB, Share: quota.Share{Priority: quota.PriorityDefault}}, Containers: 1})
	f.Add(withHooks(f, "cri16-default", "createRuntime", good))
	f.Add([]byte(`{"hooks":{"prestart":[{"path":"/cgpu-hook","args":["x","allocated","alloc.cgpu.io/shares"]},5,null],"poststop":null}}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		doc, err := Decode(raw)
		if err != nil {
			return
		}
		if _, _, err := doc.TakeShares(); err != nil {
			return
		}
		text := doc.Encode()
		if !json.Valid(text) {
			t.Fatalf("%s", text)
		}
		if again, taken, err := decode(t, text).TakeShares(); taken != 0 || again != nil || err != nil {
			t.Fatalf("%v, %d, %v", again, taken, err)
		}
	})
}
