package pyapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/torchft/torchft/go/lighthouse"
	"github.com/torchft/torchft/go/pyapi/ops"
)

// LighthouseCommandHelp returns the help text if the command line requests it, otherwise "". The command line
// is a JSON list of strings without the program's name.
func LighthouseCommandHelp(arguments string) (text string, err error) {
	defer ops.Guard(&err)
	_, err = parseCommand(arguments)
	if help, ok := errors.AsType[*lighthouse.Help](err); ok {
		return help.Usage, nil
	}
	return "", err
}

// LighthouseStart starts a lighthouse with the command line of torchft_lighthouse; the result is a handle for
// Address and ReleaseStart. alone: the process does nothing else.
func LighthouseStart(arguments, hostname string, alone bool) (op int64, err error) {
	defer ops.Guard(&err)
	cfg, err := parseCommand(arguments)
	if err != nil {
		return 0, err
	}
	cfg.Hostname = hostname
	if alone {
		lighthouse.OwnProcess()
	}
	return ops.Start(bindTimeout, func(context.Context) (any, error) {
		server, err := lighthouse.New(cfg)
		if err != nil {
			return nil, err
		}
		return ops.NewBusyServer(server), nil
	}), nil
}

func parseCommand(arguments string) (lighthouse.Config, error) {
	var args []string
	if err := json.Unmarshal([]byte(arguments), &args); err != nil {
		return lighthouse.Config{}, fmt.Errorf("arguments: %w", err)
	}
	cfg, err := lighthouse.ParseArgs(args)
	return cfg, ops.As(ops.Value, err)
}
