// Command torchft_lighthouse serves the quorum of a torchft job until it is interrupted.
package main

import (
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"syscall"

	"github.com/torchft/torchft/go/internal/logging"
	"github.com/torchft/torchft/go/lighthouse"
)

func main() {
	lines := logging.To(os.Stderr)
	log.SetOutput(lines) // slog's default logger writes there
	logging.GRPC(lines)
	lighthouse.OwnProcess()
	status := run(os.Args[1:], os.Stdout, os.Stderr)
	lines.Flush(logging.LastLines)
	os.Exit(status)
}

// run is main with arguments and output as parameters; it returns the exit status.
func run(args []string, stdout, stderr io.Writer) int {
	// Before the server starts: a signal during the start must end it, too.
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(stop)

	cfg, err := lighthouse.ParseArgs(args)
	if help := (*lighthouse.Help)(nil); errors.As(err, &help) {
		_, _ = fmt.Fprint(stdout, help.Usage)
		return 0
	}
	if err != nil {
		return fail(stderr, 2, err)
	}
	server, err := lighthouse.New(cfg)
	if err != nil {
		return fail(stderr, 1, err)
	}
	_, _ = fmt.Fprintf(stdout, "torchft lighthouse listening on %s\n", server.Address())
	<-stop
	signal.Stop(stop) // a second signal ends the process at once
	server.Shutdown()
	return 0
}

func fail(stderr io.Writer, code int, err error) int {
	_, _ = fmt.Fprintf(stderr, "torchft_lighthouse: %s\n", err)
	return code
}
