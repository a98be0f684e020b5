// SPDX-License-Identifier: Apache-2.0

package runner

import (
	"errors"
	"fmt"
	"testing"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// TestRefusal: a refusal is about a flag, and no variable of containers is in it.
func TestRefusal(t *testing.T) {
	gpu := ledger.GPU{UUID: "GPU-1", Index: 0}
	for _, test := range []struct {
		err  error
		want string
	}{
		{&quota.Error{Variable: "ALIYUN_COM_GPU_MEM_CONTAINER", Value: "99GiB", Reason: "is too much", Remedy: "or set ALIYUN_COM_GPU_MEM_DEV"},
			`run: --memory "1GiB": is too much; ask for less`},
		{&quota.Error{Variable: "ALIYUN_COM_GPU_VISIBLE_DEVICES", Value: "7", Reason: "is none"},
			`run: --gpu "7": is none; cgpu smi lists the GPUs of this machine`},
		{&quota.Error{Variable: "ALIYUN_COM_GPU_CORE_PERCENTAGE", Value: "30", Reason: "is not free", Remedy: "wait"},
			`run: --percent "30": is not free; wait`},
		{&quota.Error{Variable: "CGPU_MEM_SPILL", Reason: "is not free"}, `run: --spill "2GiB": is not free`},
		{fmt.Errorf("x: %w", &ledger.Refusal{GPU: gpu, Reason: "asked for much", Remedy: "wait"}),
			`run: --memory "1GiB": GPU 0 (GPU-1): asked for much; wait`},
		{&ledger.Refusal{Reason: "asked for much", Remedy: "wait"}, `run: --memory "1GiB": asked for much; wait`},
		{&ledger.Refusal{GPU: gpu, Time: true, Reason: "its policy is native", Remedy: "choose another"},
			`GPU 0 (GPU-1): its policy is native; choose another`},
		{errors.New("other"), "other"},
	} {
		typed := map[string]string{"memory": "1GiB", "gpu": "7", "percent": "30", "spill": "2GiB"}
		got := Refusal(test.err, func(flag string) (string, bool) { value, ok := typed[flag]; return value, ok }).Error()
		if got != test.want {
			t.Errorf("got  %s\nwant %s", got, test.want)
		}
	}
}

// TestFlags holds the table of flags to the names that pkg/quota uses in its refusals.
func TestFlags(t *testing.T) {
	env := map[string]string{}
	for _, f := range flags {
		env[f.variable] = map[string]string{"memory": "1GiB", "gpu": "0"}[f.flag]
		if env[f.variable] == "" {
			env[f.variable] = "1"
		}
	}
	var list []string
	for name, value := range env {
		list = append(list, name+"="+value)
	}
	q, err := quota.FromSpec(list, nil)
	if err != nil {
		t.Fatal(err)
	}
	for name := range env {
		if _, ok := q.Asked[name]; !ok {
			t.Errorf("quota does not know %s", name)
		}
	}
}

// TestNameOfServer: a user who comes through sudo has no run that an administrator takes for a domain's server.
func TestNameOfServer(t *testing.T) {
	for _, test := range []struct {
		sudo, asked, command string
		want                 bool
	}{
		{"1000", "mps-team-0", "sleep", false}, {"1000", "", "/bin/mps-team-0", false},
		{"1000", "my-mps-team", "sleep", true}, {"", "mps-team-0", "sleep", true},
	} {
		t.Setenv("SUDO_UID", test.sudo)
		if _, err := Name(test.asked, []string{test.command}); (err == nil) != test.want {
			t.Errorf("%+v: %v", test, err)
		}
	}
}
