// Package tracing makes OpenTelemetry spans for work that is part of a traced step: the parent span comes
// from the rank.
//
// It is off, and costs one comparison, unless the standard OTEL variables of this process turn it on.
package tracing

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/exporters/stdout/stdouttrace"
	"go.opentelemetry.io/otel/propagation"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/metadata"

	"github.com/torchft/torchft/go/internal/logging"
)

// parentKey is the header of W3C trace context that names the parent span.
const parentKey = "traceparent"

// flushTime bounds the export of the last spans at the end of a server.
const flushTime = 2 * time.Second

var (
	setup    sync.Once
	provider atomic.Pointer[sdktrace.TracerProvider] // nil: off
	w3c      propagation.TraceContext
)

// Setup reads the environment, once in a process. An invalid variable is logged, and turns tracing off.
func Setup(log *slog.Logger) {
	setup.Do(func() {
		kinds, err := Exporters(os.Getenv)
		if err == nil && len(kinds) > 0 {
			err = begin(kinds)
		}
		if err != nil {
			log.Warn("torchft: nothing is traced", "error", err)
		}
	})
}

// Exporters returns the trace exporters that OpenTelemetry's variables ask for; none by default.
func Exporters(env func(string) string) ([]string, error) {
	if strings.EqualFold(strings.TrimSpace(env("OTEL_SDK_DISABLED")), "true") {
		return nil, nil
	}
	text := strings.TrimSpace(env("OTEL_TRACES_EXPORTER"))
	if text == "" {
		if env("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") != "" || env("OTEL_EXPORTER_OTLP_ENDPOINT") != "" {
			return []string{"otlp"}, nil
		}
		return nil, nil
	}
	var kinds []string
	for kind := range strings.SplitSeq(text, ",") {
		kinds = append(kinds, strings.TrimSpace(kind))
	}
	if slices.Equal(kinds, []string{"none"}) {
		return nil, nil
	}
	for _, kind := range kinds {
		if kind != "otlp" && kind != "console" {
			return nil, fmt.Errorf("OTEL_TRACES_EXPORTER is %q: allowed are none, or otlp and console", text)
		}
	}
	return kinds, nil
}

// begin starts the exporters. The SDK reads the variables for sampler, resource and batches itself.
func begin(kinds []string) error {
	var options []sdktrace.TracerProviderOption
	for _, kind := range kinds {
		var exporter sdktrace.SpanExporter
		var err error
		if kind == "console" {
			exporter, err = stdouttrace.New(stdouttrace.WithWriter(logging.File(os.Stderr)))
		} else {
			exporter, err = otlptracehttp.New(context.Background())
		}
		if err != nil {
			return err
		}
		options = append(options, sdktrace.WithBatcher(exporter))
	}
	provider.Store(sdktrace.NewTracerProvider(options...))
	return nil
}

// Use passes all spans to a processor until restore is called, for tests.
func Use(processor sdktrace.SpanProcessor) (restore func()) {
	before := provider.Swap(sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(processor)))
	return func() { provider.Store(before) }
}

// Flush exports the remaining spans, for at most flushTime.
func Flush() {
	if p := provider.Load(); p != nil {
		ctx, cancel := context.WithTimeout(context.Background(), flushTime)
		defer cancel()
		_ = p.ForceFlush(ctx) // without a collector the spans are dropped
	}
}

// Span is a piece of work at a step. It is nil if the work is not traced; methods of a nil Span do nothing.
type Span struct{ span trace.Span }

// Continue begins a child of the span with the trace context parent. It returns nil if tracing is off, or
// parent is invalid.
func Continue(parent, name string, step int64, attributes ...attribute.KeyValue) *Span {
	if parent == "" {
		return nil
	}
	p := provider.Load()
	if p == nil {
		return nil
	}
	ctx := w3c.Extract(context.Background(), propagation.MapCarrier{parentKey: parent})
	if !trace.SpanContextFromContext(ctx).IsValid() {
		return nil
	}
	attributes = append(attributes, attribute.Int64("torchft.step", step))
	_, span := p.Tracer("torchft").Start(ctx, name, trace.WithAttributes(attributes...))
	return &Span{span}
}

// Parent returns the trace context for children of this span; empty for a nil Span.
func (s *Span) Parent() string {
	if s == nil {
		return ""
	}
	carrier := propagation.MapCarrier{}
	w3c.Inject(trace.ContextWithSpan(context.Background(), s.span), carrier)
	return carrier[parentKey]
}

// Set adds attributes.
func (s *Span) Set(attributes ...attribute.KeyValue) {
	if s != nil {
		s.span.SetAttributes(attributes...)
	}
}

// End ends the span. err is the reason why the work failed, nil if it succeeded.
func (s *Span) End(err error) {
	if s == nil {
		return
	}
	if err != nil {
		s.span.SetStatus(codes.Error, err.Error())
	}
	s.span.End()
}

type contextKey struct{}

// Below makes the spans of calls with the returned context children of the span with this trace context; an
// empty one changes nothing. Calls whose message has a field for the trace context get it from ParentOf; all
// others carry it in gRPC's metadata.
func Below(ctx context.Context, parent string) context.Context {
	if parent == "" {
		return ctx
	}
	return metadata.AppendToOutgoingContext(context.WithValue(ctx, contextKey{}, parent), parentKey, parent)
}

// ParentOf returns the trace context that Below has added.
func ParentOf(ctx context.Context) string {
	parent, _ := ctx.Value(contextKey{}).(string)
	return parent
}

// Incoming returns the trace context of the caller, from gRPC's metadata.
func Incoming(ctx context.Context) string {
	if provider.Load() == nil {
		return ""
	}
	md, _ := metadata.FromIncomingContext(ctx)
	if values := md.Get(parentKey); len(values) == 1 {
		return values[0]
	}
	return ""
}
