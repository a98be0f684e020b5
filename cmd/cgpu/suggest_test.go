package main

import (
	"errors"
	"fmt"
	"io/fs"
	"syscall"
	"testing"
)

func TestDidYouMean(t *testing.T) {
	known := []string{"", "smi", "set", "spec", "doctor", "gpu", "CGPU_MEM", "CGPU_WEIGHT", "ALIYUN_COM_GPU_MEM_CONTAINER", "ALIYUN_COM_GPU_SCHD_WEIGHT"}
	for word, want := range map[string]string{
		"sim": "smi", "docter": "doctor", "gpus": "gpu", "CGPU_WEIGTH": "CGPU_WEIGHT", "cgpu_mem": "CGPU_MEM",
		"ALIYUN_COM_GPU_MEM_CONTAINERS": "ALIYUN_COM_GPU_MEM_CONTAINER", "aliyun_com_gpu_mem_container": "ALIYUN_COM_GPU_MEM_CONTAINER",
		"ALIYUN_COM_GPU_WEIGHT": "ALIYUN_COM_GPU_SCHD_WEIGHT",
		"smi":                   "", "x": "", "": "", "frobnicate": "",
	} {
		got := didYouMean(word, known)
		if want != "" {
			want = "; did you mean " + want + "?"
		}
		if got != want {
			t.Errorf("%s: %q, want %q", word, got, want)
		}
	}
}

func TestComplaint(t *testing.T) {
	denied := fmt.Errorf("device: %w", &fs.PathError{Op: "open", Path: "/x", Err: syscall.EACCES})
	for _, c := range []struct {
		err  error
		args []string
		uid  int
		want string
	}{
		{denied, []string{"cgpu", "smi", "-o", "wide"}, 1000, "cgpu: needs root: sudo cgpu smi (device: open /x: permission denied)"},
		{denied, []string{"cgpu", "smi"}, 0, "cgpu: device: open /x: permission denied"},
		{denied, []string{"cgpu"}, 1000, "cgpu: needs root: sudo cgpu (device: open /x: permission denied)"},
		{errors.New("cgpu: a\nb"), []string{"cgpu", "smi"}, 1000, "cgpu: a b"},
		{errors.New("name \x1b[2J\u202e"), []string{"cgpu", "smi"}, 0, "cgpu: name ?[2J?"},
	} {
		if got := complaint(c.err, c.args, c.uid); got != c.want {
			t.Errorf("got  %s\nwant %s", got, c.want)
		}
	}
}
