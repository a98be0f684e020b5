// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"errors"
	"io"
	"reflect"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// whole is a message that is all of b.
func whole(b []byte) *Message {
	return Of(NewReader(bytes.NewReader(b)), len(b))
}

// What is cut out of an object is what Kubernetes' own types hold of it, and the rest is as if it were not there.
func TestCut(t *testing.T) {
	one := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "a", UID: "u",
		Labels: map[string]string{"x": strings.Repeat("y", 1<<20)}},
		Spec: v1.PodSpec{HostNetwork: true, NodeName: "n", ServiceAccountName: "s",
			Containers: []v1.Container{{Name: "main", Image: "i", TTY: true}, {Name: "side"}}}}
	text, err := one.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	keep := Keep{1: {1: nil, 5: nil}, 2: {2: {1: nil, 18: nil}, 10: nil, 11: nil, 13: nil}}
	got, err := whole(text).Cut(keep, 100)
	if err != nil {
		t.Fatal(err)
	}
	cut := &v1.Pod{}
	if err := cut.Unmarshal(got); err != nil {
		t.Fatal(err)
	}
	want := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "web", UID: "u"},
		Spec: v1.PodSpec{HostNetwork: true, NodeName: "n", Containers: []v1.Container{{Name: "main", TTY: true}, {Name: "side"}}}}
	if !reflect.DeepEqual(cut, want) {
		t.Errorf("%+v, want\n%+v", cut, want)
	}
	for most := range len(got) {
		if b, err := whole(text).Cut(keep, most); !errors.Is(err, ErrLarge) || cap(b) > 2*len(got) {
			t.Fatalf("%d bytes of %d: %d, %v", most, len(got), len(b), err)
		}
	}
	if _, err := whole(text).Cut(Keep{1: {11: nil}}, 1000); !errors.Is(err, ErrLarge) {
		t.Errorf("a megabyte of labels: %v", err)
	}
	for n := range text[:200] {
		if _, err := whole(text[:n]).Cut(keep, 100); n > 0 && err == nil && n != len(text) {
			// What ends between two fields is a message too; in the middle of one it is none.
			if err := new(v1.Pod).Unmarshal(text[:n]); err != nil {
				t.Errorf("%d bytes of a message are taken: %v", n, err)
			}
		}
	}
}

func FuzzCut(f *testing.F) {
	f.Add([]byte{0x0a, 2, 0x0a, 0})
	f.Add(bytes.Repeat([]byte{0x10, 1}, 100)) // numbers count, too
	f.Fuzz(func(t *testing.T, text []byte) {
		got, err := whole(text).Cut(Keep{1: {1: nil, 2: nil}, 2: nil}, 64)
		if err == nil && len(got) > 64 {
			t.Errorf("%d bytes", len(got))
		}
	})
}

// A frame whose length is a lie, and an answer that is none, are errors.
func TestBroken(t *testing.T) {
	m, err := Frame(NewReader(strings.NewReader("\xff\xff\xff\xff\x0a\x03abc")))
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Fields(func(int, *Message) error { return nil }); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("%v", err)
	}
	for _, text := range []string{"", "k8s", "{}", "k8s\x00\x0a\xff"} {
		if err := Body(NewReader(strings.NewReader(text))).Object("Pod", func(*Message) error { return nil }); err == nil {
			t.Errorf("%q is taken", text)
		}
	}
}
