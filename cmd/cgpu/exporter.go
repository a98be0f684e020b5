// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net"
	"os/signal"
	"syscall"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/exporter"
	"github.com/opencgpu/cgpu/pkg/exporter/server"
	"github.com/opencgpu/cgpu/pkg/nvmlclient"
	"github.com/opencgpu/cgpu/pkg/web"
)

func exporterCommand() *cli.Command {
	return &cli.Command{
		Name:  "exporter",
		Usage: "tell Prometheus of the node's GPUs and the containers that share them",
		Description: "It answers at /metrics until SIGTERM or Ctrl-C; docs/metrics.md lists the series. It changes nothing, and containers " +
			"live without it.\n" +
			"Only this machine reaches it, unless --listen says otherwise: what it tells are names of containers and what they use.\n\n" +
			"--web-config is a file of Prometheus' exporter-toolkit, for TLS, certificates of clients, or users with passwords. --token-file is " +
			"for a\n" +
			"token that a request must bear (Prometheus: authorization, credentials_file); do not use it together with users in the other file.\n" +
			"Where only this machine reaches it and nobody is asked who he is, requests must be for an address, localhost, this machine's name or " +
			"a\n" +
			"--host, so that no site's page can read it by a browser on this machine.\n\n" +
			"cgpu-agent has the same series at its /metrics, so a node of Kubernetes needs this not.\n\n" +
			"Examples:\n   sudo cgpu exporter\n   sudo cgpu exporter --listen unix:/run/cgpu/exporter.sock\n" +
			"   sudo cgpu exporter --listen :9471 --web-config /etc/cgpu/web.yml --token-file /etc/cgpu/token",
		Flags: append(listenFlags("127.0.0.1:9471"),
			&cli.BoolFlag{Name: "no-nvml", Usage: "do not ask NVML: no temperature, power, ECC and Xid, and the driver is not in use by this"}),
		Before: noArguments,
		Action: func(c *cli.Context) error {
			o, err := listenOptions(c)
			if err != nil {
				return usageError{fmt.Errorf("exporter: %w", err)}
			}
			ctx, stop := signal.NotifyContext(c.Context, syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			x := exporter.Options{RunDir: device.RunDir(), Version: version}
			if !c.Bool("no-nvml") {
				h := nvmlclient.New(device.HardwareLine, nvmlclient.Rest)
				defer h.Close()
				x.Hardware = h.Ask
			}
			handler := server.Metrics(exporter.New(x))
			if o.Anonymous() {
				handler = web.ForHosts(handler, hostsOf(c))
			}
			err = server.Serve(ctx, handler, o, func(a net.Addr) { fmt.Fprintf(c.App.Writer, "cgpu exporter: %s %s\n", a.Network(), a) })
			if err != nil {
				return fmt.Errorf("exporter: %w", err)
			}
			return nil
		},
	}
}
