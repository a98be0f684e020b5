// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// TestFormat: records of running containers are read and written as versions before this one did, to the byte.
func TestFormat(t *testing.T) {
	for text, want := range map[string]VGPU{
		`{"uuid":"GPU-a","limit":1073741824,"weight":1,"priority":1}`: vgpu("GPU-a", gib, 1, 0, quota.PriorityDefault),
		`{"uuid":"GPU-a","limit":1073741824,"spill":5,"weight":3,"percent":40,"priority":0}`: {UUID: "GPU-a", Slice: quota.Slice{Limit: gib,
			Spill: 5, Share: quota.Share{Weight: 3, Percent: 40}}},
	} {
		var got VGPU
		if err := json.Unmarshal([]byte(text), &got); err != nil || got != want {
			t.Errorf("%s is read as %+v, %v", text, got, err)
		}
		if b, err := json.Marshal(want); err != nil || string(b) != text {
			t.Errorf("%s, %v, want %s", b, err, text)
		}
	}
}

// TestWithoutWeight: one of an older cgpu without a weight has the default.
func TestWithoutWeight(t *testing.T) {
	l := Open(t.TempDir())
	text := `{"version":1,"records":[{"id":"c","nonce":"n","vgpus":[{"uuid":"GPU-a","limit":1073741824,"priority":1}]}]}`
	if err := os.WriteFile(l.path(fileName), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	list, err := l.List()
	if err != nil || len(list) != 1 || list[0].VGPUs[0] != vgpu("GPU-a", gib, 1, 0, quota.PriorityDefault) {
		t.Errorf("%+v, %v", list, err)
	}
}
