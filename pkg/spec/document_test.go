package spec

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
)

func TestIdentity(t *testing.T) {
	files, err := filepath.Glob("testdata/*.json")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		raw := recorded(t, strings.TrimSuffix(filepath.Base(file), ".json"))
		doc := decode(t, raw)
		for _, o := range []string{"process", "hooks", "linux", "root"} { // taking apart is not editing
			if _, err := doc.within(o); err != nil {
				t.Fatal(err)
			}
		}
		if !bytes.Equal(doc.Encode(), raw) {
			t.Errorf("%s: encoded differs", file)
		}
	}
}

// TestKeepsRest changes nothing but the members of the package's concern.
func TestKeepsRest(t *testing.T) {
	raw := []byte(` { "future":{"b":1.50,"a":1e3} ,"process":{"args":["<&>\u2028"],"env":[ "A=<" ],"zz":null},"linux":{"later":[1,2 ]}, "\u0061nnotations":{"x":"y"} } `)
	doc := decode(t, raw)
	if err := Apply(doc, plan(map[int]quota.Bytes{0: quota.GiB})); err != nil {
		t.Fatal(err)
	}
	got := string(doc.Encode())
	for _, part := range []string{` { "future":{"b":1.50,"a":1e3} ,"process":{"args":["<&>\u2028"],"env":["A=<",`, `"zz":null}`, `"linux":{"later":[1,2 ]`, `, "\u0061nnotations":{"x":"y",`} {
		if !strings.Contains(got, part) {
			t.Errorf("%s is not in %s", part, got)
		}
	}
	if !json.Valid([]byte(got)) {
		t.Errorf("invalid: %s", got)
	}
}

func TestDecodeRefuses(t *testing.T) {
	for name, raw := range map[string][]byte{
		"empty":      nil,
		"array":      []byte("[]"),
		"truncated":  []byte(`{"a":`),
		"two values": []byte(`{}{}`),
		"twice":      []byte(`{"linux":{},"linux":{}}`),
		"case":       []byte(`{"linux":{},"LINUX":{}}`),
		"huge":       append(append([]byte(`{"a":"`), bytes.Repeat([]byte("x"), MaxSize)...), `"}`...),
		"deep":       []byte(`{"a":` + strings.Repeat("[", 1e6) + strings.Repeat("]", 1e6) + `}`),
	} {
		if _, err := Decode(raw); err == nil {
			t.Errorf("%s: decoded", name)
		}
	}
}

func TestMember(t *testing.T) {
	raw := []byte(`{"config":{"runtimes":["a"],"n":null}}`)
	if got, ok := Member(raw, "config", "runtimes"); !ok || string(got) != `["a"]` {
		t.Errorf("%s, %v", got, ok)
	}
	for _, path := range [][]string{{"config", "n"}, {"x"}, {"config", "runtimes", "x"}} {
		if got, ok := Member(raw, path...); ok {
			t.Errorf("%v: %s", path, got)
		}
	}
	if _, ok := Member([]byte(`{"config"`), "config"); ok {
		t.Error("invalid JSON has a member")
	}
}

// FuzzDocument holds the editor to its promise: nothing edited, nothing changed; and after Apply valid JSON with every
// other member the same.
func FuzzDocument(f *testing.F) {
	files, _ := filepath.Glob("testdata/*.json")
	for _, file := range files {
		f.Add(recorded(f, strings.TrimSuffix(filepath.Base(file), ".json")))
	}
	f.Add([]byte(` {"process":{"env":["LD_PRELOAD=x"]},"a":{"b":[{},"\"",-1e9]},"linux":{"seccomp":{"defaultAction":"SCMP_ACT_LOG","syscalls":[{"names":["ioctl"],"action":"SCMP_ACT_ALLOW","args":[{"index":1,"value":240,"valueTwo":16,"op":"SCMP_CMP_MASKED_EQ"}]}]}}}`))
	p := plan(map[int]quota.Bytes{0: quota.GiB, 1: 0})
	p.Limiter = "/usr/lib/libcgpu.so"
	f.Fuzz(func(t *testing.T, raw []byte) {
		doc, err := Decode(raw)
		if err != nil {
			return
		}
		if !bytes.Equal(doc.Encode(), raw) {
			t.Fatalf("encoded differs: %s", doc.Encode())
		}
		if err := Apply(doc, p); err != nil {
			return
		}
		got := doc.Encode()
		if !json.Valid(got) {
			t.Fatalf("invalid: %s", got)
		}
		before, after := value[map[string]json.RawMessage](t, raw), value[map[string]json.RawMessage](t, got)
		for _, key := range []string{"process", "mounts", "linux", "hooks", "annotations"} {
			delete(before, key)
			delete(after, key)
		}
		if !reflect.DeepEqual(before, after) {
			t.Fatalf("other members changed: %s", got)
		}
		// What Apply wrote it can read, but it must refuse to do it twice.
		again, err := Decode(got)
		if err != nil {
			t.Fatal(err)
		}
		if Apply(again, p) == nil {
			t.Fatal("applied twice: two listeners")
		}
	})
}
