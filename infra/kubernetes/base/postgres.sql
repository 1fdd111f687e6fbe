CREATE DATABASE mlflow;
CREATE DATABASE prefect;
\connect prefect
CREATE EXTENSION pg_trgm;
