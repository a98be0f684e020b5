// SPDX-License-Identifier: Apache-2.0

package runner

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/opencgpu/cgpu/pkg/hostrun"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/name"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// Flags of cgpu run and the variables under which pkg/quota and pkg/admit know what they ask for.
var flags = []struct{ flag, variable, remedy string }{
	{"memory", "ALIYUN_COM_GPU_MEM_CONTAINER", "ask for less"},
	{"gpu", "ALIYUN_COM_GPU_VISIBLE_DEVICES", "cgpu smi lists the GPUs of this machine"},
	{"weight", "ALIYUN_COM_GPU_SCHD_WEIGHT", ""},
	{"percent", "ALIYUN_COM_GPU_CORE_PERCENTAGE", ""},
	{"spill", "CGPU_MEM_SPILL", ""},
	{"domain", "CGPU_DOMAIN", ""},
	{"threads", "CGPU_THREADS", ""},
}

// Asked is what was typed, by variables, as quota.Quota has it. typed is the value of a flag, and whether it was given.
func Asked(typed func(flag string) (string, bool)) map[string]string {
	asked := map[string]string{}
	for _, f := range flags {
		if value, ok := typed(f.flag); ok {
			asked[f.variable] = value
		}
	}
	return asked
}

// Refusal names flags where a refusal is about variables, which nobody has set here.
func Refusal(err error, typed func(flag string) (string, bool)) error {
	if r, ok := errors.AsType[*ledger.Refusal](err); ok && !r.Time && !r.Spill {
		where := ""
		if r.GPU.UUID != "" {
			where = r.GPU.String() + ": "
		}
		memory, _ := typed("memory")
		return fmt.Errorf("run: --memory %q: %s%s; %s", memory, where, r.Reason, r.Remedy)
	}
	e, ok := errors.AsType[*quota.Error](err)
	if !ok {
		return err
	}
	for _, f := range flags {
		if f.variable != e.Variable {
			continue
		}
		value, _ := typed(f.flag)
		text := fmt.Sprintf("run: --%s %q: %s", f.flag, value, e.Reason)
		if f.remedy != "" && (e.Remedy == "" || strings.Contains(e.Remedy, "ALIYUN_")) {
			return fmt.Errorf("%s; %s", text, f.remedy)
		}
		if e.Remedy != "" {
			return fmt.Errorf("%s; %s", text, e.Remedy)
		}
		return errors.New(text)
	}
	return err
}

// User decides who the command runs as. A user who may use sudo for cgpu run only must not name the files that it trusts.
func User(asked string) (hostrun.User, error) {
	if os.Geteuid() != 0 {
		return hostrun.User{},
			errors.New("it takes root to reserve a slice and to fence the command in: want sudo cgpu run …; the command then runs as you")
	}
	caller := sudoCaller()
	for _, name := range []string{"CGPU_RUN_DIR", "CGPU_CONFIG"} {
		if value := os.Getenv(name); value != "" && caller.ThroughSudo() {
			return hostrun.User{}, fmt.Errorf("%s=%q: is not taken from a user who comes through sudo: unset it", name, value)
		}
	}
	return hostrun.Whom(asked, caller, hostrun.Lookup)
}

func sudoCaller() hostrun.Caller {
	return hostrun.Caller{UID: 0, SudoUID: os.Getenv("SUDO_UID"), SudoGID: os.Getenv("SUDO_GID")}
}

// throughSudo says that a user has come through sudo, as whom the command runs then.
func throughSudo() bool {
	caller := sudoCaller()
	return caller.ThroughSudo()
}

// Name is what cgpu smi calls the run of a command.
func Name(asked string, command []string) (string, error) {
	given := cmp.Or(asked, hostrun.Name(command))
	if len(given) > name.MaxLength {
		return "", fmt.Errorf("run: --name: has %d bytes: want at most %d", len(given), name.MaxLength)
	}
	if throughSudo() && strings.HasPrefix(given, "mps-") { // who ends or sets a domain's server names it so
		return "", fmt.Errorf("run: --name %q: names that begin with mps- are those of trust domains' servers: give another by --name", given)
	}
	return given, nil
}
