// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"reflect"
	"slices"
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
	for _, part := range []string{` { "future":{"b":1.50,"a":1e3} ,"process":{"args":["<&>\u2028"],"env":["A=<",`, `"zz":null}`,
		`"linux":{"later":[1,2 ]`, `, "\u0061nnotations":{"x":"y",`} {
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
		"third case": []byte("{\"process\":{},\"proce\u017f\u017f\":{}}"), // Go's decoder takes it for the same
		"huge":       append(append([]byte(`{"a":"`), bytes.Repeat([]byte("x"), MaxSize)...), `"}`...),
		"deep":       []byte(`{"a":` + strings.Repeat("[", 1e6) + strings.Repeat("]", 1e6) + `}`),
	} {
		if _, err := Decode(raw); err == nil {
			t.Errorf("%s: decoded", name)
		}
	}
}

func TestStrings(t *testing.T) {
	raw := []byte(`{"x" : {"runtimes":["no"]}, "config":{"s":"]}\"", "runtimes":[ "a" ,"b\u0063"],"n":null,"mixed":["a",1],"none":[]}}`)
	if got := Strings(raw, "config", "runtimes"); !slices.Equal(got, []string{"a", "bc"}) {
		t.Errorf("%q", got)
	}
	for _, path := range [][]string{{"config", "n"}, {"config", "mixed"}, {"config", "none"}, {"config"}, {"x"}, {"y"},
		{"config", "runtimes", "x"}} {
		if got := Strings(raw, path...); got != nil {
			t.Errorf("%v: %q", path, got)
		}
	}
	for _, broken := range []string{``, `{`, `[`, `{"config"`, `{"config":`, `{"config":{"runtimes":["a"`, `{"config":{"runtimes":["a\`,
		`{"config":{"runtimes":["a]}`} {
		if got := Strings([]byte(broken), "config", "runtimes"); got != nil {
			t.Errorf("%s: %q", broken, got)
		}
	}
}

// FuzzStrings feeds the one reader of unchecked text.
func FuzzStrings(f *testing.F) {
	f.Add([]byte(`{"a":{"b":["x","\u0079"]}}`))
	f.Add([]byte(`{"a":{"b":[1,`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		got := Strings(raw, "a", "b")
		// encoding/json agrees, but for the last of keys that occur twice, keys with escapes, and null for "".
		var want map[string]map[string][]string
		if json.Unmarshal(raw, &want) != nil || len(want["a"]["b"]) == 0 || bytes.ContainsAny(raw, "\\") || bytes.Contains(raw, []byte("null")) ||
			bytes.Count(raw, []byte(`"a"`)) != 1 || bytes.Count(raw, []byte(`"b"`)) != 1 {
			return
		}
		if !slices.Equal(got, want["a"]["b"]) {
			t.Errorf("%q, want %q", got, want["a"]["b"])
		}
	})
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

// TestSaysWhere: what is wrong in a config.json of thousands of lines is found by its message.
func TestSaysWhere(t *testing.T) {
	env := func(d *Document) error { _, err := d.Env(); return err }
	for raw, test := range map[string]struct {
		read func(*Document) error
		want string
	}{
		"{\n \"a\": [1,\n  }":              {nil, "line 3, column 3: invalid character '}'"},
		`{"a":`:                            {nil, "line 1, column 5: unexpected end"},
		`{"process":{"env":["A=b",7]}}`:    {env, "process.env[1]: "},
		`{"annotations":{"x":"y","z":{}}}`: {func(d *Document) error { _, err := d.Annotations(); return err }, `annotations: "z": `},
		`{"linux":{"resources":[]}}`: {func(d *Document) error { _, err := d.list("devices", "linux", "resources"); return err },
			"linux.resources: want an object"},
		`{"linux":{"resources":{"devices":1}}}`: {func(d *Document) error { _, err := d.list("devices", "linux", "resources"); return err },
			"linux.resources.devices: want an array"},
		`{"linux":{"seccomp":7}}`: {func(d *Document) error { _, err := d.must("linux", "seccomp"); return err },
			"linux.seccomp: want an object"},
	} {
		doc, err := Decode([]byte(raw))
		if err == nil && test.read != nil {
			err = test.read(doc)
		}
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", raw, err, test.want)
		}
	}
}
