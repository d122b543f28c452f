package pyapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/torchft/torchft/go/lighthouse"
	"github.com/torchft/torchft/go/pyapi/ops"
)

// LighthouseServerStart starts a lighthouse; the result is a handle for Address and ReleaseStart.
func LighthouseServerStart(bind, hostname string, minReplicas, joinTimeoutMs, quorumTickMs, heartbeatTimeoutMs int64, security, stateDir string) (op int64, err error) {
	defer ops.Guard(&err)
	cfg := lighthouse.DefaultConfig()
	cfg.Bind, cfg.Hostname, cfg.MinReplicas, cfg.StateDir = bind, hostname, int(minReplicas), stateDir
	protected, err := parseSecurity(security)
	if err != nil {
		return 0, err
	}
	cfg.Security = protected.Security
	if cfg.JoinTimeout, err = lighthouse.Milliseconds("join_timeout_ms", joinTimeoutMs); err != nil {
		return 0, ops.As(ops.Value, err)
	}
	if cfg.QuorumTick, err = lighthouse.Milliseconds("quorum_tick_ms", quorumTickMs); err != nil {
		return 0, ops.As(ops.Value, err)
	}
	if cfg.HeartbeatTimeout, err = lighthouse.Milliseconds("heartbeat_timeout_ms", heartbeatTimeoutMs); err != nil {
		return 0, ops.As(ops.Value, err)
	}
	if err := cfg.Validate(); err != nil {
		return 0, ops.As(ops.Value, err)
	}
	return startLighthouse(cfg), nil
}

// LighthouseCommandHelp returns the help text if the command line requests it, otherwise "". The command line is a JSON list of
// strings without the program's name.
func LighthouseCommandHelp(arguments string) (text string, err error) {
	defer ops.Guard(&err)
	_, err = parseCommand(arguments)
	if help, ok := errors.AsType[*lighthouse.Help](err); ok {
		return help.Usage, nil
	}
	return "", err
}

// LighthouseCommandStart is LighthouseServerStart with the command line of torchft_lighthouse.
func LighthouseCommandStart(arguments, hostname string) (op int64, err error) {
	defer ops.Guard(&err)
	cfg, err := parseCommand(arguments)
	if err != nil {
		return 0, err
	}
	cfg.Hostname = hostname
	lighthouse.OwnProcess()
	return startLighthouse(cfg), nil
}

func parseCommand(arguments string) (lighthouse.Config, error) {
	var args []string
	if err := json.Unmarshal([]byte(arguments), &args); err != nil {
		return lighthouse.Config{}, fmt.Errorf("arguments: %w", err)
	}
	cfg, err := lighthouse.ParseArgs(args)
	return cfg, ops.As(ops.Value, err)
}

func startLighthouse(cfg lighthouse.Config) int64 {
	return ops.Start(bindTimeout, func(context.Context) (any, error) {
		server, err := lighthouse.New(cfg)
		if err != nil {
			return nil, err
		}
		return ops.NewBusyServer(server), nil
	})
}
