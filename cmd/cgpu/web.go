// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"syscall"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/exporter/server"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/terminal"
	"github.com/opencgpu/cgpu/pkg/web"
)

func webCommand() *cli.Command {
	return &cli.Command{
		Name:  "web",
		Usage: "show GPUs and containers in a browser",
		Description: "It serves one page until SIGTERM or Ctrl-C: the node's GPUs, who has and gets what, and the last hour, as far as it has " +
			"been running. It\n" +
			"changes nothing, and containers live without it. Only this machine reaches it, unless --listen says otherwise; from elsewhere:\n" +
			"ssh -L 9472:127.0.0.1:9472 NODE.\n\n" +
			"--web-config and --token-file are as for cgpu exporter; a browser asks for the token as a password, with any name. Requests must be " +
			"for\n" +
			"an address, localhost, this machine's name, the host of --listen or a --host, so that no other site's page can read this one.\n\n" +
			"Examples:\n   sudo cgpu web\n   sudo cgpu web --listen :9472 --web-config /etc/cgpu/web.yml --host gpu1.example.com",
		Flags:  listenFlags("127.0.0.1:9472"),
		Before: noArguments,
		Action: func(c *cli.Context) error {
			o, err := listenOptions(c)
			if err != nil {
				return usageError{fmt.Errorf("web: %w", err)}
			}
			ctx, stop := signal.NotifyContext(c.Context, syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			name, _ := os.Hostname()
			names := new(snapshot.Names)
			page := web.New(web.Options{Host: terminal.Printable(name), Version: version, Names: hostsOf(c),
				// Without a table it says so: to have one made every two seconds would be too much.
				Look: func() (snapshot.View, error) { return snapshot.Look(device.RunDir(), nil, names) }})
			go page.Run(ctx)
			err = server.Serve(ctx, page, o, func(a net.Addr) {
				fmt.Fprintf(c.App.Writer, "cgpu web: %s %s\n", a.Network(), a)
			})
			if err != nil {
				return fmt.Errorf("web: %w", err)
			}
			return nil
		},
	}
}

// listenFlags say where a server answers, and whom.
func listenFlags(address string) []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "listen", Usage: "`ADDRESS`: HOST:PORT, or unix: and the path of a socket that only root may use", Value: address},
		&cli.StringFlag{Name: "web-config", Usage: "`FILE` of exporter-toolkit"},
		&cli.StringFlag{Name: "token-file", Usage: "`FILE` with a token of 16 characters or more"},
		&cli.BoolFlag{Name: "insecure", Usage: "let everybody who reaches the port read it"},
		&cli.StringSliceFlag{Name: "host", Usage: "`NAME` of a host for which requests may be, too; may be repeated"},
	}
}

// hostsOf are the names by which a server of this command may be asked.
func hostsOf(c *cli.Context) []string {
	name, _ := os.Hostname()
	listen, _, _ := net.SplitHostPort(c.String("listen"))
	return append(c.StringSlice("host"), name, listen)
}

func listenOptions(c *cli.Context) (server.Options, error) {
	o := server.Options{Listen: c.String("listen"), WebConfig: c.String("web-config"), TokenFile: c.String("token-file"),
		Insecure: c.Bool("insecure"),
		Log:      slog.New(slog.NewTextHandler(c.App.ErrWriter, &slog.HandlerOptions{Level: slog.LevelWarn}))}
	return o, o.Check()
}
